"""Programs that run in processes forked from one that has imported torch and launcher.

A new interpreter takes 2 s of CPU time to import torch, and 0.3 s to import the command line. Most tests are
about what a program does after that. `tests/e2e/` and `tests/slurm/` start every rank afresh, `tests/cli/`
starts the verbs whose start is tested.

The server is that of `multiprocessing`. It is started when it is needed first, and ends with this process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.forkserver import set_forkserver_preload
from multiprocessing.resource_tracker import _resource_tracker
from pathlib import Path
from typing import NoReturn

import launcher

IMPORTED = (
    "tests.warm",
    "bitsandbytes",
    "peft",
    "sklearn.datasets",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel.distributed",
    "torch.utils.checkpoint",
    "torch.utils.data",
    "torch.utils.flop_counter",
    "jinja2",
    "rich.console",
    "rich.table",
    "ruamel.yaml",
    "launcher.tasks.huggingface",
    "launcher.train.checkpoints.checkpoints",
    "launcher.train.model",
    "launcher.train.pipeline.stage",
    "launcher.train.handover.handover",
    "launcher.train.undo.state_finder",
    "tests.shared_self_tests",
)
"""Modules that are imported before the fork, with those of VERBS. `launcher.train.error_report`, and what
imports it, is not among them: it reads the environment when it is imported."""
LAUNCHER = Path(launcher.__file__).parent
VERBS = tuple(
    ".".join(("launcher", *file.relative_to(LAUNCHER).with_suffix("").parts))
    for room in ("api", "cli", "diagnosis", "memory", "planning", "render", "report", "rundir", "schedulers")
    for file in sorted((LAUNCHER / room).rglob("*.py"))
    if file.name not in ("__init__.py", "__main__.py")
)
"What verbs import."
PATH = [folder for folder in sys.path if folder]
"In the server: where a new interpreter looks for modules, beside the folder of its program."
_ASKING = threading.Lock()
"""Held by a thread that asks how a program has ended. The server says it once, and `Process.start` asks about
every program: the second of two threads that ask at a time takes the program for ended with 255."""
PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Program:
    module: bool
    "`argv[0]` is a module, as after `python -m`, and not a file."
    argv: list[str]
    environ: Mapping[str, str]
    folder: Path
    "Working directory."
    fresh: bool = False
    "It is a new interpreter, as it always is if this machine has a GPU: CUDA does not survive a fork."


def start(program: Program, stdout: int, stderr: int) -> ForkServerProcess:
    """Run a program in a session of its own, with these outputs. If the server ends, it is killed."""
    set_forkserver_preload([*IMPORTED, *VERBS])
    outputs = [Connection(os.dup(number), readable=False) for number in (stdout, stderr)]
    process = ForkServerContext().Process(target=_become, args=(program, *outputs))
    with _ASKING:
        process.start()
    for output in outputs:
        output.close()
    return process


def exit_code(process: ForkServerProcess) -> int | None:
    """Return the exit code of a program, or None if it runs."""
    with _ASKING:
        return process.exitcode


def signal_session(process: ForkServerProcess, number: signal.Signals) -> None:
    """Send a signal to a program and to what it has started in its session."""
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):  # it has not called setsid yet, or has just ended
        os.killpg(process.pid, number)


def run(program: Program, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run a program until it has ended and everything that holds its output, as subprocess.run does.

    Raises subprocess.TimeoutExpired after `timeout` seconds, when the program is killed.
    """
    (from_stdout, to_stdout), (from_stderr, to_stderr) = os.pipe(), os.pipe()
    process = start(program, to_stdout, to_stderr)
    os.close(to_stdout)
    os.close(to_stderr)
    with open(from_stdout) as stdout, open(from_stderr) as stderr, ThreadPoolExecutor(2) as readers:
        said = [readers.submit(output.read) for output in (stdout, stderr)]
        late = futures.wait(said, timeout).not_done
        if late:
            signal_session(process, signal.SIGKILL)
        wait([process.sentinel])
        code = exit_code(process)
        assert code is not None
    if late:
        raise subprocess.TimeoutExpired(program.argv, timeout, *(one.result() for one in said))
    return subprocess.CompletedProcess(program.argv, code, *(one.result() for one in said))


def _become(program: Program, stdout: Connection, stderr: Connection) -> NoReturn:
    """Make this process look like a new interpreter, run the program, and exit."""
    gc.freeze()  # a collection would copy all that is shared with the server
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with open(os.devnull, "rb") as nothing, stdout, stderr:
        for file, number in ((nothing, 0), (stdout, 1), (stderr, 2)):
            os.dup2(file.fileno(), number)
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.chdir(program.folder)
    os.environ.clear()
    os.environ.update(program.environ)
    if program.fresh or sys.modules["torch"].cuda._is_in_bad_fork():  # an import has looked at the GPUs
        options = ["-m"] if program.module else []
        os.execv(sys.executable, [sys.executable, *options, *program.argv])
    multiprocessing.set_start_method(None, force=True)
    _resource_tracker._fd = None  # shared with the server and every other process that it forks
    sys.argv = list(program.argv)
    first = str(Path.cwd()) if program.module else str(Path(sys.argv[0]).parent)
    sys.path = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *PATH]
    try:
        if program.module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
        code: object = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)

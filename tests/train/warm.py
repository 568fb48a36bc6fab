"""Ranks that are forked from a process which has imported torch.

A new interpreter takes 1.5 s of CPU time to import torch, and torchrun is one more. Most tests of
launcher.train are about what ranks do after that. `tests/e2e/` and `tests/slurm/` start every rank afresh.

`python -m tests.train.warm` reads one request per line from stdin, as JSON, and answers each with the exit
codes of its ranks. `run` is the client.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from launcher.spec import variables
from launcher.spec.verdict import EXIT_STOPPED
from launcher.supervise.local_ranks import KILL_SECONDS, SETTLE_SECONDS, shared_environment
from launcher.supervise.ports import hold_port

IMPORTED = (
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
    "launcher.spec.cluster",
    "launcher.tasks.huggingface",
    "launcher.train.checkpoints.checkpoints",
    "launcher.train.model",
    "launcher.train.pipeline.stage",
    "launcher.train.recovery.handover",
    "launcher.train.recovery.state_finder",
)
"""Modules that are imported before the fork. `launcher.train.failure`, and what imports it, is not among
them: it reads the environment when it is imported."""
PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Request:
    """Ranks to start on one host."""

    module: bool
    "`argv[0]` is a module, as after `python -m`, and not a file."
    argv: list[str]
    ranks: int
    environ: dict[str, str]
    "Of every rank. LOCAL_WORLD_SIZE is in it if the ranks pretend to be on several nodes."
    together: bool
    "The ranks get the variables that torchrun sets."
    fresh: bool
    "Each rank is a new interpreter, as it always is if this machine has a GPU: CUDA does not survive a fork."
    output: str
    "File that gets stdout and stderr of the ranks."
    timeout: float
    "Seconds, after which the ranks are killed."


def run(request: Request) -> dict[int, int]:
    """Return the exit code of each rank; 128 + n if signal n ended it. Raises subprocess.TimeoutExpired."""
    parent = _parent()
    try:
        assert parent.stdin and parent.stdout
        parent.stdin.write(json.dumps(asdict(request)) + "\n")
        parent.stdin.flush()
        answer = parent.stdout.readline()
    except BaseException:  # a later request must not read this one's answer
        _end()
        raise
    if not answer:
        _end()
        raise RuntimeError("the process that forks the ranks has ended")
    codes = {int(rank): int(code) for rank, code in json.loads(answer).items()}
    if not codes:
        raise subprocess.TimeoutExpired(request.argv, request.timeout, Path(request.output).read_bytes())
    return codes


@cache
def _parent() -> subprocess.Popen[str]:
    """One for this process, started when it is needed first."""
    atexit.register(_end)
    return subprocess.Popen(
        [sys.executable, "-m", "tests.train.warm"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _end() -> None:
    if _parent.cache_info().currsize:
        with contextlib.suppress(OSError), _parent() as parent:
            parent.kill()
        _parent.cache_clear()
        atexit.unregister(_end)


def serve() -> Callable[[], object]:
    """Answer requests until stdin ends. Returns only in a rank: what the rank has to do."""
    path = sys.path[1:]  # without the folder that `python -m` adds
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    for line in sys.stdin:
        request = Request(**json.loads(line))
        with hold_port() as holder:
            pids: dict[int, int] = {}
            for rank in range(request.ranks):
                pid = os.fork()
                if not pid:
                    signal.pthread_sigmask(signal.SIG_SETMASK, before)
                    return _rank(request, rank, holder.getsockname()[1], path)
                pids[pid] = rank
            codes = _wait(pids, request.timeout)
        print(json.dumps(codes), flush=True)
    sys.exit()


def _wait(pids: dict[int, int], timeout: float) -> dict[int, int]:
    """Return the exit code of each rank by its number, or nothing after the timeout.

    As under torchrun, a rank that fails ends the others. Ranks that exit with EXIT_STOPPED do not: all were
    asked to stop, and each leaves by itself.
    """
    codes: dict[int, int] = {}
    due, number, failed, timed_out = time.monotonic() + timeout, signal.SIGKILL, False, False
    while pids:
        signal.sigtimedwait({signal.SIGCHLD}, max(0.0, due - time.monotonic()))
        while pids and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            code, rank = os.waitstatus_to_exitcode(ended[1]), pids.pop(ended[0])
            codes[rank] = code if code >= 0 else 128 - code
            if codes[rank] not in (0, EXIT_STOPPED) and not failed:
                failed, due, number = True, time.monotonic() + SETTLE_SECONDS, signal.SIGTERM
        if pids and time.monotonic() >= due:
            timed_out = not failed
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):  # it has not called setsid yet
                    os.killpg(pid, number)
            due, number = time.monotonic() + KILL_SECONDS, signal.SIGKILL
    return {} if timed_out else codes


def _rank(request: Request, rank: int, port: int, path: list[str]) -> Callable[[], object]:
    """Make this process look like a new interpreter, and return what runs the program."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with open(os.devnull, "rb") as nothing, open(request.output, "ab") as output:
        for file, number in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(file.fileno(), number)
    os.environ.clear()
    os.environ.update(request.environ)
    if request.together:
        given = {variables.RUN_ID: "test", **request.environ}
        os.environ.update(shared_environment(given, request.ranks, port))
        os.environ.update(dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank)))
        os.environ.update({n: v for n, v in request.environ.items() if n == "LOCAL_WORLD_SIZE"})
    if request.fresh or sys.modules["torch"].cuda._is_in_bad_fork():  # an import has looked at the GPUs
        os.execv(sys.executable, [sys.executable, *(["-m"] if request.module else []), *request.argv])
    sys.argv = request.argv
    first = str(Path.cwd()) if request.module else str(Path(sys.argv[0]).parent)
    sys.path = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *path]
    if request.module:
        return lambda: runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    return lambda: runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    serve()()

"""The process between torchrun and one rank: it starts the rank, writes its logs, and records its end.

`python -m launcher.supervise.worker [--alone] -- ARGV...`, started by torchrun once per rank, or by start.sh
for the only one. It imports little, since it starts as often as there are ranks. Its exit status is the
rank's.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.logs.capture import RankCapture, secrets_of
from launcher.logs.mask import masked_text
from launcher.runs.files import read_record, replace_json
from launcher.runs.layout import AttemptDir, RunDir
from launcher.runs.shared import remove_handover
from launcher.spec.command import environment_name, fill
from launcher.supervise.process import (
    die_with_parent,
    dying_with,
    end_processes,
    processes_of,
    signal_group,
)

GRACE_SECONDS = 20.0
"From SIGTERM to SIGKILL of the rank; torchrun kills this process after 30."
ORPHAN_GRACE_SECONDS = 3.0
"The same when torchrun or the supervisor is gone: nobody waits for the rank any more."

RESERVE_BYTES = 64 * 1024
"More than 20 last lines of at most 2,000 characters."

MAX_EXCEPTION = 4000
"Characters of a message that are kept: XLA lists every buffer."

CPU_HEAP = (
    "glibc.malloc.hugetlb=1:glibc.malloc.top_pad=67108864"
    ":glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=2147483648"
)
"""Bytes. On a CPU tensors lie in glibc's heap, which gives back what a step has freed and gets it again in
the next one, page by page of 4 KiB. With huge pages that stay a step takes 4 to 7 % less
(benchmarks/train.py). Source: glibc manual, "Memory Allocation Tunables"; older versions and other C
libraries ignore it."""

NOT_FOUND, NOT_EXECUTABLE = 127, 126  # as a shell reports them


class Worker:
    """One rank of one attempt."""

    def __init__(self, environ: dict[str, str], *, alone: bool = False) -> None:
        """`alone`: start.sh has started it, not torchrun."""
        self.alone = alone
        self.run = RunDir(Path(environ["LAUNCHER_RUN_DIR"]))
        self.attempt: AttemptDir = self.run.attempt(int(environ["LAUNCHER_ATTEMPT"]))
        self.node = int(environ.get("LAUNCHER_NODE_RANK", "0"))
        self.rank = int(environ["RANK"])
        self.capture = RankCapture(
            self.attempt.rank_log(self.node, self.rank, "out"),
            self.attempt.rank_log(self.node, self.rank, "err"),
            secrets_of(environ),
        )
        self.parent = os.getppid()
        # Given back when the record is written: on a full disk the rank's end must still fit.
        self.reserve = self.attempt.exit(self.rank).with_suffix(".reserve")
        with contextlib.suppress(OSError):
            self.reserve.parent.mkdir(parents=True, exist_ok=True)
            self.reserve.write_bytes(b"\0" * RESERVE_BYTES)
        self.child: subprocess.Popen[bytes] | None = None
        self.stopping = False

    def main(self, argv: list[str]) -> int:
        """Run the rank to its end. Returns its exit code, negative for a signal."""
        # By hand an only rank may outlive the shell that it was started from.
        if not self.alone or "LAUNCHER_SUPERVISED" in os.environ:
            die_with_parent(signal.SIGTERM)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, self._stop)
        started = time.time()
        try:
            self.child = subprocess.Popen(
                self._filled(argv),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=_environment(self.run, self.attempt),
                preexec_fn=dying_with(os.getpid(), signal.SIGKILL, own_group=True),
            )
        except OSError as error:
            return self._not_started(argv[0], error, started)
        code = self.capture.pump(self.child)
        signal_group(self.child.pid, signal.SIGKILL)  # what the rank left behind in its group
        self.capture.close()
        self._record(code, started)
        if os.getppid() != self.parent:
            # The supervisor, which looks for leftovers, is gone: what left the rank's group is ours to end.
            everything = (self.run.path, self.attempt.number, self.node)
            end_processes(lambda: processes_of(*everything), grace=ORPHAN_GRACE_SECONDS)
            remove_handover(self.run, self.node)
        return code

    def _filled(self, argv: list[str]) -> list[str]:
        values = placeholder_values(self.run, self.attempt)
        return [fill(argument, values) for argument in argv]

    def _stop(self, signum: int, _frame: object) -> None:
        self.stopping = True
        if self.child is None:
            return
        signal_group(self.child.pid, signal.SIGTERM)
        orphaned = os.getppid() != self.parent
        # After the grace an alarm ends the rank; the pump sees the closed pipes.
        signal.signal(signal.SIGALRM, self._kill)
        signal.setitimer(signal.ITIMER_REAL, ORPHAN_GRACE_SECONDS if orphaned else GRACE_SECONDS)

    def _kill(self, _signum: int, _frame: object) -> None:
        if self.child is not None:
            signal_group(self.child.pid, signal.SIGKILL)

    def _not_started(self, program: str, error: OSError, started: float) -> int:
        code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
        self.capture.note(f"cannot start {program!r}: {error.strerror}")
        self.capture.close()
        self._record(code, started)
        return code

    def _record(self, code: int, started: float) -> None:
        ended = time.time()
        record = {
            "rank": self.rank,
            "node": self.node,
            "time": ended,
            "exit_code": code,
            "seconds": round(ended - started, 3),
            "max_rss": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
            "last_lines": self.capture.last_lines,
            "exception": told_exception(os.environ) if code else None,
            "stopping": self.stopping,
        }
        path = self.attempt.exit(self.rank)
        with contextlib.suppress(OSError):
            self.reserve.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # a full disk: the exit status still tells
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_json(path, record)


def told_exception(environ: Mapping[str, str]) -> str | None:
    """`Type: message` from the error file of a script whose main function is under torchelastic's @record."""
    told = read_record(Path(environ.get("TORCHELASTIC_ERROR_FILE") or os.devnull)).get("message")
    text = told.get("message") if isinstance(told, dict) else told
    return masked_text(text[:MAX_EXCEPTION], environ) if isinstance(text, str) else None


def _environment(run: RunDir, attempt: AttemptDir) -> dict[str, str]:
    """The rank's environment: `python` in a command means the interpreter that launcher runs under.

    A script that takes no arguments reads there what a command's placeholders say.
    """
    about = run.read_about()
    told = {
        environment_name(name): value for name, value in placeholder_values(run, attempt).items() if value
    }
    environment = {"PYTHONUNBUFFERED": "1", **of_the_heap(about), **os.environ, **told}
    if "PATH" not in about.get("job", {}).get("env", {}):
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment.get('PATH', os.defpath)}"
    return environment


def of_the_heap(about: Mapping[str, Any]) -> dict[str, str]:
    """Variables of a task that trains on the CPU. `about` is the content of run.json."""
    on_cpu = about.get("job", {}).get("task") is not None and not about.get("gpus_per_node")
    return {"GLIBC_TUNABLES": CPU_HEAP} if on_cpu else {}


def placeholder_values(run: RunDir, attempt: AttemptDir) -> dict[str, str]:
    """Every placeholder of spec/command.py with its value in this attempt."""
    about = run.read_about()
    job: dict[str, Any] = about.get("job", {})
    recipe = run.read_recipe(attempt)
    fields = ("micro_batch_size", "grad_accum", "precision", "optimizer", "sharding", "activations")
    values = {name: recipe.get(name, "") for name in fields}
    values |= {"global_batch": job.get("batch", {}).get("global", "")}
    values |= {name: job.get(name) or "" for name in ("steps", "epochs")}
    values |= {
        "run_id": run.id,
        "run_dir": run.path,
        "checkpoint_dir": run.checkpoints,
        "attempt": attempt.number,
    }
    return {name: str(value) for name, value in values.items()}


def main() -> None:
    argv = sys.argv[1:]
    alone = argv[:1] == ["--alone"]
    if alone:
        from launcher.supervise.alone import environment_of_one  # imports what others do without

        os.environ.update(environment_of_one(os.environ))
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # of a torchrun around launcher
        argv = argv[1:]
    if argv[:1] == ["--"]:
        argv = argv[1:]
    worker = Worker(dict(os.environ), alone=alone)
    code = worker.main(argv)
    if alone and worker.stopping and code == 0:
        code = -signal.SIGTERM  # as torchrun: who was told to end has not finished
    if code < 0:
        # End by the same signal, so that who waits for it reports what really happened.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()

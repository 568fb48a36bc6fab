"""The process that starts all ranks of one host and ends them together.

start.sh runs `python -m launcher.supervise.local_ranks RANKS -- ARGV...`. It does what torchrun does on one
host, without torchrun's import of torch (0.7 s and 220 MiB per attempt). It imports the worker once and forks
it for each rank.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from launcher.rundir.layout import RunDir
from launcher.rundir.shared_memory_folders import remove_error_folders
from launcher.spec import variables
from launcher.spec.signals import STOP_SIGNALS
from launcher.supervise import worker
from launcher.supervise.ports import hold_port

SETTLE_SECONDS = 0.1
"""Time from the first failure to SIGTERM of the other ranks, so that those that fail for the same reason can
report it. torchrun checks for failures at the same interval (`--monitor-interval`)."""
KILL_SECONDS = 30.0
"Time from SIGTERM to SIGKILL of a worker, as in torchrun."


def main() -> None:
    ranks, argv = int(sys.argv[1]), sys.argv[3:]  # sys.argv[2] is `--`
    # Held until the last worker has ended, so that no other run takes the port before rank 0 listens.
    with hold_port() as holder:
        environment = shared_environment(os.environ, ranks, holder.getsockname()[1])
        supervised = variables.SUPERVISED in os.environ
        code = LocalRanks(ranks, argv, environment, heeds_stop=not supervised).run()
    # Killed workers have not removed their folders.
    node = int(os.environ.get(variables.NODE_RANK, "0"))
    remove_error_folders(RunDir(Path(os.environ[variables.RUN_DIR])), node)
    sys.exit(code)


class LocalRanks:
    """The workers of one attempt on one host."""

    def __init__(
        self, ranks: int, argv: Sequence[str], environment: Mapping[str, str], *, heeds_stop: bool
    ) -> None:
        """`environment` is that of every rank. `heeds_stop`: end the ranks on STOP_SIGNALS, which a
        supervisor answers by itself."""
        self._ranks, self._argv, self._environment = ranks, list(argv), environment
        self._signals = {signal.SIGCHLD, *(STOP_SIGNALS if heeds_stop else ())}
        self._workers: set[int] = set()
        self._code = 0
        "Exit code of the first worker that failed."
        self._next: tuple[float, signal.Signals] | None = None
        "When to send which signal to the remaining workers, by time.monotonic."

    def run(self) -> int:
        """Start a worker for each rank and wait for all. If one fails, end the others.

        Return 0, or the exit code of the first that failed, which is 128 + n if signal n ended it.
        """
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, *STOP_SIGNALS})
        mask = {*before, *STOP_SIGNALS}
        for rank in range(self._ranks):
            self._workers.add(self._fork(rank, mask))
        while self._workers:
            timeout = 3600.0 if self._next is None else max(0.0, self._next[0] - time.monotonic())
            received = signal.sigtimedwait(self._signals, timeout)
            if received is not None and received.si_signo != signal.SIGCHLD:
                self._fail(128 + received.si_signo, settle=0.0)
            self._collect()
            self._signal_if_due()
        return self._code

    def _fork(self, rank: int, mask: set[int]) -> int:
        """Return the pid of a new worker, whose blocked signals are `mask`."""
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            self._watch(rank, parent, mask)
        return pid

    def _watch(self, rank: int, parent: int, mask: set[int]) -> NoReturn:
        """Act as the worker of a rank, and exit without the parent's clean-up handlers."""
        code = 1
        try:
            os.setsid()  # as under torchrun: what is sent to the group of start.sh does not end a worker
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.environ.update(self._environment)
            os.environ.update(dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank)))
            code = worker.watch(self._argv, parent)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def _collect(self) -> None:
        """Collect the children that have ended, including those that start.sh left behind."""
        while self._workers:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            if pid in self._workers:
                self._workers.remove(pid)
                code = os.waitstatus_to_exitcode(status)
                if code:
                    self._fail(code if code > 0 else 128 - code, settle=SETTLE_SECONDS)

    def _fail(self, code: int, *, settle: float) -> None:
        if not self._code:
            self._code = code
            self._next = time.monotonic() + settle, signal.SIGTERM

    def _signal_if_due(self) -> None:
        if self._next is not None and time.monotonic() >= self._next[0]:
            for pid in self._workers:
                os.kill(pid, self._next[1])  # its pid is not reused before `_collect`
            self._next = time.monotonic() + KILL_SECONDS, signal.SIGKILL


def shared_environment(environ: Mapping[str, str], ranks: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets to the same value for all ranks of one host.

    Source: documentation of torch 2.13, "torchrun", Environment Variables.

    `environ` has LAUNCHER_RUN_DIR, LAUNCHER_RUN_ID and LAUNCHER_ATTEMPT. No store listens at `port` yet:
    without an agent's store, torch has rank 0 serve it (torch/distributed/rendezvous.py). If another process
    listens there first, rank 0 fails at once.
    """
    attempt = RunDir(Path(environ[variables.RUN_DIR])).started(environ)
    worlds = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE")
    # torchrun sets this, too, because the ranks share the CPUs.
    threads = {"OMP_NUM_THREADS": "1"} if ranks > 1 and "OMP_NUM_THREADS" not in environ else {}
    return {
        **dict.fromkeys(worlds, str(ranks)),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": f"{environ[variables.RUN_ID]}-{attempt.number}",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",  # torchrun's default
        "TORCHELASTIC_ERROR_FILE": "",  # one may be set by a torchrun that started launcher itself
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        **threads,
    }


if __name__ == "__main__":
    main()

"""Processes that do not outlive the one that started them (Linux)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(signum: signal.Signals) -> None:
    """The kernel sends `signum` to the calling process when its parent dies. Survives exec."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)


def dying_with(parent: int, signum: signal.Signals, *, own_group: bool = False) -> Callable[[], None]:
    """A `preexec_fn`: the child gets `signum` when `parent` (the pid that forks it) dies."""

    def before_exec() -> None:
        if own_group:
            os.setpgid(0, 0)
        die_with_parent(signum)
        if os.getppid() != parent:  # it died before the line above took effect
            os.kill(os.getpid(), signum)

    return before_exec


def signal_group(leader: int, signum: signal.Signals) -> None:
    """Signal every process of a group; an ended group is no error."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signum)


def processes_of(run_dir: Path, attempt: int | None = None, node: int = 0) -> list[int]:
    """Pids on this host of a run's processes, or of one attempt's on one node.

    They are found by their environment, which children inherit: a process that left its group or
    lost its parent is found all the same. The supervisor itself has no LAUNCHER_ATTEMPT.
    """
    marks = {b"LAUNCHER_RUN_DIR=" + os.fsencode(run_dir)}
    if attempt is not None:
        marks |= {f"LAUNCHER_ATTEMPT={attempt}".encode(), f"LAUNCHER_NODE_RANK={node}".encode()}
    pids = []
    for pid, environ in _environments():
        entries = set(environ.split(b"\0"))
        if marks <= entries and any(entry.startswith(b"LAUNCHER_ATTEMPT=") for entry in entries):
            pids.append(pid)
    return pids


def _environments() -> Iterator[tuple[int, bytes]]:
    me = os.getpid()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != me:
            with contextlib.suppress(OSError):  # another user's, or just ended
                yield int(entry.name), (entry / "environ").read_bytes()


def end_processes(find: Callable[[], Iterable[int]], grace: float) -> int:
    """SIGTERM, then after `grace` seconds SIGKILL, until `find` finds none. Returns how many there were."""
    seen: set[int] = set()
    deadline = time.monotonic() + grace
    signum = signal.SIGTERM if grace else signal.SIGKILL
    signalled: set[int] = set()
    while True:
        alive = list(find())
        if not alive or time.monotonic() > deadline + 10:
            return len(seen)
        if time.monotonic() >= deadline:
            signum, signalled = signal.SIGKILL, set()
        for pid in alive:
            if pid not in signalled:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signum)
        signalled.update(alive)
        seen.update(alive)
        time.sleep(0.05)

"""Start, find and end processes, so that none outlives its supervisor (Linux)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from launcher.spec import variables
from launcher.spec.signals import STOP_SIGNALS

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 1, 36, 37  # linux/prctl.h
WORKER_MODULES = frozenset({b"launcher.supervise.worker", b"launcher.supervise.local_ranks"})
"Modules of workers. `local_ranks` forks its workers, which keep its command line."

END_RANK, KILL_RANK = signal.SIGTERM, signal.SIGHUP
"Signals from the supervisor to a worker. A worker accepts them from no other process."
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(signum: signal.Signals, parent: int) -> None:
    """Make the kernel send `signum` to this process when `parent`, which forked it, dies. Survives exec."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above took effect
        os.kill(os.getpid(), signum)


def dying_with(
    parent: int,
    signum: signal.Signals,
    *,
    own_group: bool = False,
    blocked: Iterable[signal.Signals] = (),
) -> Callable[[], None]:
    """Return a `preexec_fn`: the child gets `signum` when `parent`, the pid that forks it, dies.

    The child and its descendants block the signals `blocked` of STOP_SIGNALS and ignore none of STOP_SIGNALS.
    """

    def before_exec() -> None:
        if own_group:
            os.setpgid(0, 0)
        for stop_signal in STOP_SIGNALS:
            signal.signal(stop_signal, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        die_with_parent(signum, parent)

    return before_exec


def signal_group(leader: int, signum: signal.Signals) -> None:
    """Signal every process of a group. It is not an error if the group has ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signum)


def processes_of(
    run_dir: Path, attempt: int | None = None, node: int = 0, *, of_ranks: bool = False
) -> list[int]:
    """Return the pids on this host of a run's processes, or of one attempt on one node.

    `of_ranks`: leave out the processes of launcher and torchrun.

    Processes are found by their environment, which children inherit. This also finds a process that left its
    group or lost its parent. The supervisor itself has no LAUNCHER_ATTEMPT. Processes that replaced their
    environment are found by `descendants`.
    """
    marks = {f"{variables.RUN_DIR}=".encode() + os.fsencode(run_dir)}
    if attempt is not None:
        marks |= {f"{variables.ATTEMPT}={attempt}".encode(), f"{variables.NODE_RANK}={node}".encode()}
    required = f"{variables.WORKER if of_ranks else variables.ATTEMPT}=".encode()
    pids = []
    for pid, environ in environments():
        entries = set(environ.split(b"\0"))
        if marks <= entries and any(entry.startswith(required) for entry in entries):
            pids.append(pid)
    return pids


def open_files(pids: Iterable[int]) -> set[Path]:
    """Return the files that processes have open."""
    files = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # just ended
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    files.add(entry.readlink())
    return files


def workers_of(run_dir: Path, attempt: int, node: int, *, parent: int) -> list[int]:
    """Return the pids of the live processes that watch the ranks of one attempt on one node.

    `parent` is the process that starts them.
    """
    pids = []
    for pid in processes_of(run_dir, attempt, node):
        with contextlib.suppress(OSError):  # just ended
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:4]
            if pid != parent and not WORKER_MODULES.isdisjoint(words):
                pids.append(pid)
    return pids


def adopt_orphans() -> None:
    """Make this process the parent of every orphaned descendant (a "child subreaper", prctl(2)).

    A process then cannot escape `descendants` by a new session or an empty environment. The caller must also
    call `reap` now and then.
    """
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> list[int]:
    """Return the pids of this process's live descendants. Empty unless `adopt_orphans` was called."""
    adopts = ctypes.c_int()
    _libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(adopts), 0, 0, 0)
    if not adopts.value:
        return []
    children: dict[int, list[int]] = {}
    dead = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # just ended
                # "PID (NAME) STATE PPID ...": the name may contain spaces and parentheses.
                state, parent = (entry / "stat").read_bytes().rpartition(b")")[2].split()[:2]
                children.setdefault(int(parent), []).append(int(entry.name))
                if state in (b"Z", b"X"):
                    dead.add(int(entry.name))
    pids: list[int] = []
    open_ = [os.getpid()]
    while open_:
        children_of_pid = children.get(open_.pop(), [])
        pids += children_of_pid
        open_ += children_of_pid
    return [pid for pid in pids if pid not in dead]


def reap(excluded: int | None = None) -> None:
    """Collect adopted children that have ended. `excluded` is a child that other code waits for."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid == excluded:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)


def environments() -> Iterator[tuple[int, bytes]]:
    """Yield the pid and the environment of this user's other processes on this host."""
    me = os.getpid()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != me:
            with contextlib.suppress(OSError):  # another user's, or just ended
                yield int(entry.name), (entry / "environ").read_bytes()


def end_processes(find: Callable[[], Iterable[int]], grace: float) -> None:
    """Send SIGTERM, and SIGKILL after `grace` seconds, until `find` returns none."""
    deadline = time.monotonic() + grace
    signum = signal.SIGTERM if grace else signal.SIGKILL
    signalled: set[int] = set()
    while True:
        alive = list(find())
        if not alive or time.monotonic() > deadline + 10:
            return
        if time.monotonic() >= deadline:
            signum, signalled = signal.SIGKILL, set()
        for pid in alive:
            if pid not in signalled:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signum)
        signalled.update(alive)
        time.sleep(0.05)

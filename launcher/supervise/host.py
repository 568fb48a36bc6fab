"""Facts about this host: OOM kills, free disk space and which supervisor is alive."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.rundir.files import open_regular, read_record, try_lock
from launcher.rundir.host_memory import cgroups
from launcher.rundir.layout import RunDir
from launcher.supervise.start import lock_path


def oom_kills(root: Path = Path("/")) -> int:
    """Return how many processes the kernel's OOM killer has ended.

    Count in this process's cgroup, which contains the ranks, or on the whole host if it has no counter.
    """
    counters = [folder / name for folder in cgroups(root) for name in ("memory.events", "memory.oom_control")]
    for file in (*counters, root / "proc/vmstat"):
        with contextlib.suppress(OSError, ValueError):
            for line in file.read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


def disk_full(path: Path) -> bool:
    """Return whether less than 1 MiB is free, or the free space is unknown."""
    try:
        return shutil.disk_usage(path).free < 2**20
    except OSError:
        return True


class AlreadySupervisedError(Exception):
    """Another live supervisor holds this run."""


ALIVE_SECONDS = 20.0
"How often a live supervisor updates the time of its lock file."
SILENT_SECONDS = 180.0
"A supervisor on another host counts as ended after this long without an update, by the file server's clock."
LOCK_SECONDS = 2.0
"How long to retry the lock. A status query holds it for an instant."


@contextlib.contextmanager
def supervisor_lock(run: RunDir, node: int = 0) -> Iterator[None]:
    """Hold the lock of a supervisor during the block. The kernel releases it even after kill -9.

    Raises AlreadySupervisedError.
    """
    with open(lock_path(run.path, node), "a+", encoding="utf-8") as file:
        deadline = time.monotonic() + LOCK_SECONDS
        while not try_lock(file):
            if time.monotonic() > deadline:
                raise AlreadySupervisedError(f"{run.path} already has a running supervisor")
            time.sleep(0.02)
        with contextlib.suppress(OSError):
            file.truncate(0)
            file.write(json.dumps(this_process()))
            file.flush()
        ended = threading.Event()
        threading.Thread(target=_keep_alive, args=(file.fileno(), ended), daemon=True).start()
        try:
            yield
        finally:
            ended.set()


def _keep_alive(descriptor: int, ended: threading.Event) -> None:
    while not ended.wait(ALIVE_SECONDS):
        with contextlib.suppress(OSError):
            os.utime(descriptor)


def supervisor_alive(run: RunDir) -> bool | None:
    """Return whether a supervisor holds the run now, or None if this user cannot tell.

    A supervisor on another host is visible only if the file system shares locks between hosts.
    """
    try:
        with open_regular(run.supervisor_lock) as file:  # read permission is enough for LOCK_SH
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError:
        return None
    return False


def supervisor_gone(run: RunDir) -> bool:
    """Return whether the run had a supervisor and it has ended.

    Its lock is free. In addition, the supervisor ran on this machine, or its files have not changed for
    SILENT_SECONDS: locks of another host may be invisible here.
    """
    if not (sign := last_sign(run)) or supervisor_alive(run) is not False:
        return False
    return is_here(read_record(run.supervisor_lock)) or _time_in(run.path) - sign > SILENT_SECONDS


def last_sign(run: RunDir) -> float:
    """Return when a supervisor last updated its lock or the state, in Unix seconds; 0 if none has."""
    signs = [0.0]
    for file in (run.supervisor_lock, run.state):
        with contextlib.suppress(OSError):
            signs.append(file.stat().st_mtime)
    return max(signs)


def shows_life(run: RunDir) -> bool:
    """Return whether a supervisor holds the run, or one on another host updated its lock a minute ago.

    Locks of another host may be invisible here.
    """
    if supervisor_alive(run):
        return True
    if is_here(read_record(run.supervisor_lock)):
        return False
    with contextlib.suppress(OSError):
        return _time_in(run.path) - run.supervisor_lock.stat().st_mtime < 3 * ALIVE_SECONDS
    return False


def _time_in(folder: Path) -> float:
    """Return the time that a new file in this folder gets, in Unix seconds.

    In a shared folder it comes from the file server's clock, as the times of other hosts' files do. If no
    file can be written, return this machine's time.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()


def signal_supervisor(run: RunDir, signum: int) -> bool:
    """Send a signal to the supervisor on this machine. Return False if there is none."""
    record = read_record(run.supervisor_lock, {"pid": int})
    if not supervisor_alive(run) or not is_here(record):
        return False
    try:
        os.kill(record["pid"], signum)
    except OSError:
        return False
    return True


def this_process() -> dict[str, Any]:
    """Return what names this process on all machines, for `may_live`."""
    return {"pid": os.getpid(), **_machine()}


def may_live(process: Mapping[str, Any]) -> bool:
    """Return whether the process of such a record lives, or is on another machine."""
    if not is_here(process):
        return True
    try:
        os.kill(process["pid"], 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # another user's
    return True


def is_here(record: Mapping[str, Any]) -> bool:
    """Return whether a record of `this_process` is of a process of this machine."""
    return any(record.get(name) == value for name, value in _machine().items())


def _machine() -> dict[str, str]:
    """Return names of this machine. A restarted container has a new host name but the same kernel boot."""
    names = {"host": socket.gethostname()}
    with contextlib.suppress(OSError):
        names["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return names

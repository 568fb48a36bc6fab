"""Facts about this host that a verdict or a status needs."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from launcher.rundir.files import open_regular, read_record
from launcher.rundir.layout import RunDir
from launcher.supervise.memory_limit import cgroups


def oom_kills(root: Path = Path("/")) -> int:
    """How many processes the kernel's OOM killer has ended: of our cgroup, in which the ranks are, too; where
    that does not count them, of the whole host."""
    counters = [folder / name for folder in cgroups(root) for name in ("memory.events", "memory.oom_control")]
    for file in (*counters, root / "proc/vmstat"):
        with contextlib.suppress(OSError, ValueError):
            for line in file.read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


def disk_full(path: Path) -> bool:
    """Less than a MiB left, or no word about it."""
    try:
        return shutil.disk_usage(path).free < 2**20
    except OSError:
        return True


class AlreadySupervisedError(Exception):
    """Another living supervisor holds this run."""


ALIVE_SECONDS = 20.0
"A living supervisor sets the time of its lock file so often."
SILENT_SECONDS = 180.0
"Without a new time, a supervisor on another host has ended. Clocks of hosts differ by less."
LOCK_SECONDS = 2.0
"Somebody who asks for the status holds the lock for an instant: try again for this long."


def _lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class SupervisorLock:
    """Held for a supervisor's whole life; the kernel lets go however it ends (kill -9 as well)."""

    def __init__(self, run: RunDir, node: int = 0) -> None:
        self.path = lock_path(run, node)
        self._file: IO[str] | None = None
        self._ended = threading.Event()

    def __enter__(self) -> SupervisorLock:
        self._file = open(self.path, "a+", encoding="utf-8")
        deadline = time.monotonic() + LOCK_SECONDS
        while not _lock(self._file):
            if time.monotonic() > deadline:
                self._file.close()
                raise AlreadySupervisedError(f"{self.path.parent} already has a living supervisor")
            time.sleep(0.02)
        with contextlib.suppress(OSError):
            self._file.truncate(0)
            self._file.write(json.dumps({"pid": os.getpid(), **_machine()}))
            self._file.flush()
        threading.Thread(target=self._live, args=(self._file.fileno(),), daemon=True).start()
        return self

    def _live(self, descriptor: int) -> None:
        while not self._ended.wait(ALIVE_SECONDS):
            with contextlib.suppress(OSError):
                os.utime(descriptor)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._file is not None:
            self._file.close()


def lock_path(run: RunDir, node: int) -> Path:
    return run.supervisor_lock if node == 0 else run.supervisor_lock.with_suffix(f".{node:02d}.lock")


def supervisor_alive(run: RunDir) -> bool | None:
    """Whether a supervisor holds the run now; None where this user cannot tell.

    True for one on another host, if the file system shares its locks.
    """
    try:
        with open_regular(run.supervisor_lock) as file:  # who may only read can ask, too
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError:
        return None
    return False


def supervisor_gone(run: RunDir) -> bool:
    """Whether a supervisor has lived and lives no more.

    Its lock is free, and either this machine would see it held, or nothing has shown that it lives for
    SILENT_SECONDS: another host's locks may not show here.
    """
    signs = []
    for file in (run.supervisor_lock, run.state):
        with contextlib.suppress(OSError):
            signs.append(file.stat().st_mtime)
    if not signs or supervisor_alive(run) is not False:
        return False
    here = _is_here(read_record(run.supervisor_lock))
    return here or time.time() - max(signs) > SILENT_SECONDS


def shows_life(run: RunDir) -> bool:
    """Whether a supervisor holds the run or, on a host whose locks may not show here, did a minute ago."""
    if supervisor_alive(run):
        return True
    if _is_here(read_record(run.supervisor_lock)):
        return False
    with contextlib.suppress(OSError):
        return time.time() - run.supervisor_lock.stat().st_mtime < 3 * ALIVE_SECONDS
    return False


def signal_supervisor(run: RunDir, signum: int) -> bool:
    """Send a signal to the supervisor that lives on this machine. False: there is none."""
    record = read_record(run.supervisor_lock, {"pid": int})
    if not supervisor_alive(run) or not _is_here(record):
        return False
    try:
        os.kill(record["pid"], signum)
    except OSError:
        return False
    return True


def _is_here(record: Mapping[str, Any]) -> bool:
    return any(record.get(name) == value for name, value in _machine().items())


def _machine() -> dict[str, str]:
    """Names of this machine. A container that is restarted has another host name and the same kernel."""
    names = {"host": socket.gethostname()}
    with contextlib.suppress(OSError):
        names["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return names

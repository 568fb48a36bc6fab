"""Facts about this host that a verdict or a status needs."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from launcher.runs.layout import RunDir


def oom_kills(root: Path = Path("/")) -> int:
    """How many processes the kernel's OOM killer has ended: of our cgroup, in which the ranks are, too; where
    that does not count them, of the whole host."""
    for file in (*_of_our_cgroup(root), root / "proc/vmstat"):
        with contextlib.suppress(OSError, ValueError):
            for line in file.read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


def _of_our_cgroup(root: Path) -> Iterator[Path]:
    """Where versions 2 and 1 may count. A container may see its own cgroup as the root of all."""
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                top, name = root / "sys/fs/cgroup", "memory.events"
            elif "memory" in controllers.split(","):
                top, name = root / "sys/fs/cgroup/memory", "memory.oom_control"
            else:
                continue
            yield top / path.lstrip("/") / name
            yield top / name


def disk_full(path: Path) -> bool:
    """Less than a MiB left, or no word about it."""
    try:
        return shutil.disk_usage(path).free < 2**20
    except OSError:
        return True


class AlreadySupervisedError(Exception):
    """Another living supervisor holds this run."""


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
            self._file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
            self._file.flush()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()


def lock_path(run: RunDir, node: int) -> Path:
    return run.supervisor_lock if node == 0 else run.supervisor_lock.with_suffix(f".{node:02d}.lock")


def supervisor_alive(run: RunDir) -> bool:
    """Whether a supervisor holds the run now. True for one on another host, if the file system has locks."""
    try:
        with open(run.supervisor_lock, "a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def supervisor_gone(run: RunDir) -> bool:
    """A supervisor ran on this host and lives no more. Another host's locks may not show here."""
    host = supervisor_record(run).get("host")
    return host == socket.gethostname() and not supervisor_alive(run)


def supervisor_record(run: RunDir) -> dict[str, Any]:
    """`{"pid", "host"}` of the last supervisor."""
    with contextlib.suppress(OSError, ValueError):
        record = json.loads(run.supervisor_lock.read_text(encoding="utf-8"))
        return record if isinstance(record, dict) else {}
    return {}

"""A process on this machine that looks after the runs of a sweep, which have no queue of their own.

It holds a lock in the sweep's folder until it ends, so that there is one at most.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from launcher.schedulers.base import SchedulerError

LOCK, LOG = "queue.lock", "queue.log"


def is_looked_after(folder: Path) -> bool:
    """Whether the process of the sweep in this folder lives."""
    try:
        with open(folder / LOCK, encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:  # taken
        return True
    return False


@contextlib.contextmanager
def looking_after(folder: Path, module: str, *more: str) -> Iterator[None]:
    """Wrap the code that submits runs of a sweep. Then start `python -m MODULE FOLDER MORE...`, unless it
    lives.

    Raises SchedulerError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK, "a", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield
            return
        try:
            yield
        finally:  # after an error, too: runs that were submitted before it go on
            pid = _start([sys.executable, "-m", module, str(folder), *more], folder, lock.fileno())
            lock.truncate(0)
            lock.write(f"{pid}\n")


def _start(command: list[str], folder: Path, lock: int) -> int:
    """Start the process, which has the lock until it ends. Return its id. Raises SchedulerError."""
    with open(folder / LOG, "ab", opener=_for_us_alone) as log:
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=[lock],
            ).pid
        except OSError as error:
            raise SchedulerError(f"cannot start {command[0]}: {error.strerror}") from None


def _for_us_alone(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)

"""A process on this machine that looks after the runs of a sweep, which have no queue of their own.

It holds a lock in the sweep's folder until it ends, so that there is one at most.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

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


def look_after(folder: Path, module: str, *more: str) -> None:
    """Start `python -m MODULE FOLDER MORE...`, unless it lives. Raises SchedulerError."""
    with _locked(folder) as lock:
        if lock is not None:
            _start(lock, folder, module, more)


@contextlib.contextmanager
def looking_after(folder: Path, module: str) -> Iterator[None]:
    """Wrap the code that submits runs of a sweep, which are looked after meanwhile, then call `look_after`.

    Raises SchedulerError.
    """
    with _locked(folder) as lock:
        try:
            yield
        finally:  # after an error, too: runs that were submitted before it go on
            if lock is not None:
                _start(lock, folder, module)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[TextIO | None]:
    """Take the lock; None if another process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK, "a", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield lock


def _start(lock: TextIO, folder: Path, module: str, more: Sequence[str] = ()) -> None:
    """Start the process, which has the lock until it ends, and note its id. Raises SchedulerError."""
    command = [sys.executable, "-m", module, str(folder), *more]
    with open(folder / LOG, "ab", opener=_for_us_alone) as log:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=[lock.fileno()],
            )
        except OSError as error:
            raise SchedulerError(f"cannot start {command[0]}: {error.strerror}") from None
    lock.truncate(0)
    lock.write(f"{process.pid}\n")


def _for_us_alone(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)

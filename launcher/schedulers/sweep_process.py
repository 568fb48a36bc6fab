"""A process on this machine that starts or moves the runs of a sweep where there is no queue.

It holds a lock in the sweep's folder until it ends, so there is at most one per sweep.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from launcher.rundir.files import try_lock
from launcher.schedulers.base import SchedulerError
from launcher.supervise.start import held, open_log

LOCK, LOG = "queue.lock", "queue.log"


def has_sweep_process(folder: Path) -> bool:
    """Return whether the process of the sweep in this folder is alive."""
    return held(folder / LOCK)


@contextlib.contextmanager
def sweep_process_afterwards(folder: Path, module: str, *arguments: str) -> Iterator[None]:
    """Wrap the code that submits runs of a sweep, and start the sweep's process after it, unless it is alive.

    The process is `python -m MODULE FOLDER ARGUMENTS...`. During the block the lock is held, so that the
    sweep counts as having a process. Raises SchedulerError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK, "a", encoding="utf-8") as lock:
        alive = not try_lock(lock)
        try:
            yield
        finally:  # also after an error: the runs that were submitted before it continue
            if not alive:
                _start(lock, folder, module, arguments)


def _start(lock: TextIO, folder: Path, module: str, arguments: Sequence[str]) -> None:
    """Start the process, which inherits the lock, and write its id. Raises SchedulerError."""
    command = [sys.executable, "-m", module, str(folder), *arguments]
    with open_log(folder / LOG) as log:
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

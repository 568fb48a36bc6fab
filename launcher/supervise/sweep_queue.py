"""Queue of a sweep's runs on one host: their order, and the places of runs that run at the same time.

Both are locks on bytes of one file (POSIX record locks, fcntl(2)). The kernel frees them when the process
that holds them ends, however it ends. A child process does not inherit them.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

LINE = 2**20
"Offset of the lock of task 0, and the largest number of places."


class QueueError(Exception):
    """The file cannot be opened or locked; the message says why."""


class SweepQueue:
    """One run in the queue of its sweep. `close` gives up what it holds, and so does the end of the process.

    A process that opens the file a second time loses its locks when it closes either.
    """

    def __init__(self, file: Path, task: int, places: int | None) -> None:
        """`task`: the run's number in the sweep. `places`: how many runs run at the same time, or None.

        Raises QueueError.
        """
        self.path, self.task, self.places = file, task, places
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise QueueError(f"the queue of the sweep, {file}: {error.strerror}") from None
        self._place: int | None = None

    def is_first(self) -> bool:
        """Join the queue, and return whether no run with a lower number waits. Raises QueueError."""
        if not self._lock(fcntl.LOCK_EX, LINE + self.task):
            return False  # another run is checking at this moment
        if self.task == 0:
            return True
        if not self._lock(fcntl.LOCK_SH, LINE, self.task):
            return False
        self._lock(fcntl.LOCK_UN, LINE, self.task)
        return True

    def take_place(self) -> bool:
        """Take a free place. Raises QueueError."""
        if self.places is None or self._place is not None:
            return True
        places = range(self.places)
        self._place = next((place for place in places if self._lock(fcntl.LOCK_EX, place)), None)
        return self._place is not None

    def leave_place(self) -> None:
        if self._place is not None:
            self._lock(fcntl.LOCK_UN, self._place)
            self._place = None

    def leave_line(self) -> None:
        """Let the next run be first. The place is kept."""
        self._lock(fcntl.LOCK_UN, LINE + self.task)

    def close(self) -> None:
        os.close(self._file)

    def _lock(self, kind: int, start: int, length: int = 1) -> bool:
        """Return False if another process holds a lock in this range. Raises QueueError."""
        flags = fcntl.LOCK_NB if kind != fcntl.LOCK_UN else 0
        try:
            fcntl.lockf(self._file, kind | flags, length, start)
        except BlockingIOError:
            return False
        except OSError as error:
            raise QueueError(f"{self.path} cannot be locked: {error.strerror}") from None
        return True

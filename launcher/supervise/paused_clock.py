"""A clock that stops while this process is stopped, for example by `scontrol suspend` or a closed laptop."""

from __future__ import annotations

import time

LONGEST_SECONDS = 10.0
"Longest time counted between two readings. A running process needs far less, even on a slow file system."


class AwakeClock:
    """Counts the time during which this process runs. Call `now` several times a second."""

    def __init__(self) -> None:
        self._seconds, self._looked = 0.0, time.monotonic()

    def now(self) -> float:
        """Return the seconds for which this process has been running, counted from an arbitrary moment."""
        now = time.monotonic()
        self._seconds += min(now - self._looked, LONGEST_SECONDS)
        self._looked = now
        return self._seconds

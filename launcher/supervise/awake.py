"""A clock that stands while this process is stopped, as by `scontrol suspend` or a closed laptop."""

from __future__ import annotations

import time

LONGEST_SECONDS = 10.0
"Between two looks of a process that runs: several times what a slow file system takes."


class AwakeClock:
    """To be looked at several times a second."""

    def __init__(self) -> None:
        self._seconds, self._looked = 0.0, time.monotonic()

    def now(self) -> float:
        """Seconds for which this process has been running, from any beginning."""
        now = time.monotonic()
        self._seconds += min(now - self._looked, LONGEST_SECONDS)
        self._looked = now
        return self._seconds

"""Detect that no rank of an attempt prints anything any more."""

from __future__ import annotations

import contextlib

from launcher.rundir.layout import AttemptDir
from launcher.supervise.paused_clock import AwakeClock

LOOK_SECONDS = 1.0
"Interval between two checks of the logs' sizes."


class Stall:
    """Watches the logs of one attempt's ranks. `after`: seconds without output; None disables the check."""

    def __init__(self, attempt: AttemptDir, after: float | None) -> None:
        self.after = after
        self.stalled = False
        self._attempt = attempt
        self._size = -1
        self._clock = AwakeClock()
        self._grew = self._looked = self._clock.now()

    def begins(self) -> bool:
        """Return True once, when the ranks have been silent for `after` seconds."""
        now = self._clock.now()
        if self.after is None or self.stalled or now < self._looked + min(LOOK_SECONDS, self.after / 4):
            return False
        self._looked = now
        size = self._printed()
        if size != self._size:
            self._size, self._grew = size, now
        self.stalled = now > self._grew + self.after
        return self.stalled

    def _printed(self) -> int:
        total = 0
        for path in self._attempt.logs.glob("node-*/*"):
            with contextlib.suppress(OSError):
                total += path.stat().st_size
        return total

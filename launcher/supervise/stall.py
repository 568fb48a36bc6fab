"""Detect that the ranks of an attempt have stopped printing."""

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
        self._grew_at = self._checked_at = self._clock.now()

    def newly_stalled(self) -> bool:
        """Return True once, when the ranks have been silent for `after` seconds."""
        now = self._clock.now()
        if self.after is None or self.stalled or now < self._checked_at + min(LOOK_SECONDS, self.after / 4):
            return False
        self._checked_at = now
        size = self._printed_bytes()
        if size != self._size:
            self._size, self._grew_at = size, now
        self.stalled = now > self._grew_at + self.after
        return self.stalled

    def _printed_bytes(self) -> int:
        total = 0
        for path in self._attempt.logs.glob("node-*/*"):
            with contextlib.suppress(OSError):
                total += path.stat().st_size
        return total

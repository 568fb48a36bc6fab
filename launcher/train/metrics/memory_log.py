"""Write `memory/rank-003.jsonl`, one line per step on every rank, and report memory alerts."""

from __future__ import annotations

import time
from typing import Any

from launcher.rundir.files import append_json
from launcher.rundir.time import now
from launcher.spec.quantities import threshold_bytes
from launcher.train.metrics.alerts import Alerts
from launcher.train.metrics.memory import Meter, Reading
from launcher.train.metrics.notes import Notes
from launcher.train.metrics.peak_parts import PeakParts
from launcher.train.metrics.utilization import Utilization
from launcher.train.rank import Rank

SECONDS_BETWEEN_WRITES = 1.0
WRITES_PER_SECOND = 100
"Limit for all ranks together, because each write opens a file on the shared file system."


class MemoryLog:
    """Writes about once a second, less often on hundreds of ranks, and at an alert.

    If the disk is full, lines are lost and training continues.
    """

    def __init__(self, rank: Rank, meter: Meter, parts: PeakParts, notes: Notes) -> None:
        self.rank, self.meter, self.parts, self.notes = rank, meter, parts, notes
        self._utilization = Utilization(rank.device)
        capacity = meter.capacity
        threshold = threshold_bytes(rank.job.train.memory_alert, capacity) if capacity else None
        self.alerts = Alerts(rank.number, threshold, rank.recipe, capacity)
        self._folder_made = False
        self._lines: list[dict[str, Any]] = []
        self._written = float("-inf")
        self._writes_every = max(SECONDS_BETWEEN_WRITES, rank.world / WRITES_PER_SECOND)

    def step(self, step: int, *, evaluated: bool) -> Reading:
        """Record a step. `evaluated`: whether an evaluation followed it."""
        reading, parts = self.parts.after_step(self.meter.read(), evaluated=evaluated)
        more = {"parts": parts} if parts else {}
        use = self._utilization.read()
        self._lines.append({"time": now(), "step": step, **reading.known(), **use, **more})
        alerts = self.alerts.of(reading, step)
        for alert in alerts:
            self.notes.line(alert.text)
            self.notes.event(alert.event)
        if alerts or time.monotonic() - self._written >= self._writes_every:
            self.write()
        return reading

    def write(self) -> None:
        """Append the lines that are not in the file yet."""
        self._written = time.monotonic()
        lines, self._lines = self._lines, []
        if not lines:
            return
        path = self.rank.attempt.memory(self.rank.number)
        try:
            if not self._folder_made:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._folder_made = True
            append_json(path, *lines)
        except OSError as error:
            self.notes.complain(error)

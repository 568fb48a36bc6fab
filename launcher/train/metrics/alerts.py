"""When memory deserves a word: a peak above the threshold, and an allocator that fights for every byte."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from launcher.spec.base import format_bytes
from launcher.spec.recipe import Recipe
from launcher.train.metrics.memory import Reading


@dataclass(frozen=True)
class Alert:
    event: str
    text: str
    fields: dict[str, Any]


class Alerts:
    """Each kind once per attempt and rank. Decides; whoever asks prints and records."""

    def __init__(self, threshold: int | None, recipe: Recipe) -> None:
        """`threshold` in bytes, None for a device that has no peak."""
        self.threshold, self.recipe = threshold, recipe
        self._passed = self._retried = False

    def of(self, reading: Reading, step: int) -> list[Alert]:
        alerts = []
        if not self._passed and self.threshold is not None and (reading.peak or 0) > self.threshold:
            self._passed = True
            alerts.append(self._above(reading.peak or 0, self.threshold, step))
        if not self._retried and reading.num_alloc_retries:
            self._retried = True
            alerts.append(self._thrashing(reading.num_alloc_retries, step))
        return alerts

    def _above(self, peak: int, threshold: int, step: int) -> Alert:
        text = (
            f"memory alert: the peak of step {step}, {format_bytes(peak)}, "
            f"is above {format_bytes(threshold)} (train.memory_alert)"
        )
        return Alert("memory-alert", text, {"bytes": peak, "threshold": threshold})

    def _thrashing(self, retries: int, step: int) -> Alert:
        # num_alloc_retries: "failed cudaMalloc calls that result in a cache flush and retry".
        cure = "a smaller recipe.micro_batch_size"
        if not self.recipe.expandable_segments:
            cure = f"recipe.expandable_segments: true, or {cure},"
        text = (
            f"the GPU's allocator had to empty its cache {retries} time(s) up to step {step}, which is slow: "
            f"memory is nearly full or in fragments; {cure} helps"
        )
        return Alert("allocation-retries", text, {"num_alloc_retries": retries})

"""Memory alerts: a peak above the threshold, allocation retries, and fragmentation."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.spec.base import format_bytes
from launcher.spec.events import AllocationRetries, Event, MemoryAlert, MemoryInFragments
from launcher.spec.recipe import Recipe
from launcher.train.metrics.memory import Reading


@dataclass(frozen=True)
class Alert:
    event: Event
    text: str


FRAGMENTED_PART = 0.2
"Part of the capacity that the allocator holds beyond the tensors' peak, from which memory is fragmented."
NEARLY_FULL = 0.9
"Part of the capacity that the allocator must hold before fragmentation is reported."


class Alerts:
    """Decides which alerts are due, each kind once per attempt and rank. The caller reports them."""

    def __init__(self, rank: int, threshold: int | None, recipe: Recipe, capacity: int | None = None) -> None:
        """`threshold` and `capacity` are in bytes; they are None for a device without a peak."""
        self.rank, self.threshold, self.recipe, self.capacity = rank, threshold, recipe, capacity
        self._reported_peak = self._reported_retries = self._reported_fragments = False

    def of(self, reading: Reading, step: int) -> list[Alert]:
        alerts = []
        if not self._reported_peak and self.threshold is not None and (reading.peak or 0) > self.threshold:
            self._reported_peak = True
            alerts.append(self._above(reading.peak or 0, self.threshold, step))
        if not self._reported_retries and reading.num_alloc_retries:
            self._reported_retries = True
            alerts.append(self._thrashing(reading.num_alloc_retries, step))
        if not self._reported_fragments and self._is_fragmented(reading):
            self._reported_fragments = True
            alerts.append(self._fragments(reading.reserved or 0, reading.peak or 0, step))
        return alerts

    def _is_fragmented(self, reading: Reading) -> bool:
        if self.capacity is None or reading.reserved is None or reading.peak is None:
            return False
        unused = reading.reserved - reading.peak
        return reading.reserved > NEARLY_FULL * self.capacity and unused > FRAGMENTED_PART * self.capacity

    def _above(self, peak: int, threshold: int, step: int) -> Alert:
        text = (
            f"memory alert: the peak of step {step}, {format_bytes(peak)}, "
            f"is above {format_bytes(threshold)} (train.memory_alert)"
        )
        return Alert(MemoryAlert(rank=self.rank, step=step, bytes=peak, threshold=threshold), text)

    def _thrashing(self, retries: int, step: int) -> Alert:
        # num_alloc_retries: "failed cudaMalloc calls that result in a cache flush and retry".
        text = (
            f"the GPU's allocator had to empty its cache {retries} time(s) up to step {step}, which is slow: "
            f"memory is nearly full or fragmented; {self._remedy} helps"
        )
        return Alert(AllocationRetries(rank=self.rank, step=step, num_alloc_retries=retries), text)

    def _fragments(self, reserved: int, peak: int, step: int) -> Alert:
        text = (
            f"the GPU's allocator holds {format_bytes(reserved)} for {format_bytes(peak)} of tensors in step "
            f"{step}: memory is fragmented; {self._remedy} helps"
        )
        return Alert(MemoryInFragments(rank=self.rank, step=step, reserved=reserved, bytes=peak), text)

    @property
    def _remedy(self) -> str:
        smaller = "a smaller recipe.micro_batch_size"
        return (
            smaller
            if self.recipe.expandable_segments
            else (f"recipe.expandable_segments: true, or {smaller},")
        )

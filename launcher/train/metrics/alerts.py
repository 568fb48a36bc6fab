"""Memory alerts: a peak above the threshold, allocation retries, and fragmentation."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.spec.events import AllocationRetries, Event, MemoryAlert, MemoryInFragments
from launcher.spec.quantities import format_bytes
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
        self._reported: set[type[Event]] = set()

    def of(self, reading: Reading, step: int) -> list[Alert]:
        alerts = (self._above(reading, step), self._thrashing(reading, step), self._fragments(reading, step))
        due = [alert for alert in alerts if alert is not None and type(alert.event) not in self._reported]
        self._reported |= {type(alert.event) for alert in due}
        return due

    def _above(self, reading: Reading, step: int) -> Alert | None:
        peak, threshold = reading.peak or 0, self.threshold
        if threshold is None or peak <= threshold:
            return None
        text = (
            f"memory alert: the peak of step {step}, {format_bytes(peak)}, "
            f"is above {format_bytes(threshold)} (train.memory_alert)"
        )
        return Alert(MemoryAlert(rank=self.rank, step=step, bytes=peak, threshold=threshold), text)

    def _thrashing(self, reading: Reading, step: int) -> Alert | None:
        if not (retries := reading.num_alloc_retries):
            return None
        # num_alloc_retries: "failed cudaMalloc calls that result in a cache flush and retry".
        text = (
            f"the GPU's allocator had to empty its cache {retries} time(s) up to step {step}, which is slow: "
            f"memory is nearly full or fragmented; {self._remedy} helps"
        )
        return Alert(AllocationRetries(rank=self.rank, step=step, num_alloc_retries=retries), text)

    def _fragments(self, reading: Reading, step: int) -> Alert | None:
        capacity, reserved, peak = self.capacity, reading.reserved, reading.peak
        if capacity is None or reserved is None or peak is None:
            return None
        if reserved <= NEARLY_FULL * capacity or reserved - peak <= FRAGMENTED_PART * capacity:
            return None
        text = (
            f"the GPU's allocator holds {format_bytes(reserved)} for {format_bytes(peak)} of tensors in step "
            f"{step}: memory is fragmented; {self._remedy} helps"
        )
        return Alert(MemoryInFragments(rank=self.rank, step=step, reserved=reserved, bytes=peak), text)

    @property
    def _remedy(self) -> str:
        smaller = "a smaller recipe.micro_batch_size"
        segments = f"recipe.expandable_segments: true, or {smaller},"
        return smaller if self.recipe.expandable_segments else segments

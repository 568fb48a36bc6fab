"""What a recipe needs: at each of its peaks on the GPU, and on the host. As plain values."""

from __future__ import annotations

from typing import Literal

from launcher.spec.base import Value

When = Literal["first step", "steady state", "resume", "evaluation", "checkpoint"]


class Peak(Value):
    """The most that tensors hold on one GPU at one time."""

    when: When
    phase: str
    "forward, backward, optimizer, load or save."
    module: str
    "That runs then, where the trace knows it."
    allocated: int
    parts: dict[str, int]
    "Category -> bytes; `allocated` is their sum."


class Estimate(Value):
    """Of one rank's GPU and one node's host memory, in bytes."""

    peaks: tuple[Peak, ...]
    reserved: int
    "What PyTorch's allocator holds at the worst of them."
    pools: dict[str, int] = {}
    """CUDA stream -> bytes that the allocator holds for it; `reserved` is their sum. Empty before the
    allocator's model has been asked."""
    overhead: dict[str, int]
    "Outside of the allocator."
    host: dict[str, int]
    "Of a node, by category."
    managed: int = 0
    "Of a rank's paged states: on the GPU while there is room, else on the host."
    nvme: int = 0
    "Of a rank, in files."
    band: float
    "The GPU's figures are right within this part of them."
    correction: float = 1.0
    "Measured / predicted of runs in the ledger: what the tensors are taken to need more, or less."
    basis: Literal["traced", "formulas"]
    not_modelled: tuple[str, ...] = ()

    @property
    def worst(self) -> Peak:
        return max(self.peaks, key=lambda peak: peak.allocated)

    @property
    def allocated(self) -> int:
        return self.worst.allocated

    @property
    def needed(self) -> int:
        """Held against the card."""
        return round(self.reserved * self.correction) + sum(self.overhead.values())

    @property
    def host_per_node(self) -> int:
        return sum(self.host.values())

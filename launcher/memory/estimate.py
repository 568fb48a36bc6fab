"""The memory that a recipe needs: its peaks on the GPU, and host memory. Plain values."""

from __future__ import annotations

from typing import Literal

from launcher.spec.value import Value

When = Literal["first step", "steady state", "resume", "evaluation", "checkpoint"]


class Peak(Value):
    """The most bytes allocated on one GPU in one phase, as `torch.cuda.max_memory_allocated` counts."""

    when: When
    phase: str
    "forward, backward, optimizer, load or save."
    module: str
    "The module that runs at the peak, if the trace knows it."
    allocated: int
    parts: dict[str, int]
    "Category -> bytes; `allocated` is their sum."

    def with_part(self, category: str, size: int) -> Peak:
        """Return this peak with `size` more bytes, as a category of its own."""
        parts = {**self.parts, category: size}
        return self.model_copy(update={"allocated": self.allocated + size, "parts": parts})


class Estimate(Value):
    """The memory of one rank's GPU and of one node's host, in bytes."""

    peaks: tuple[Peak, ...]
    reserved: int
    "Bytes that PyTorch's allocator holds at the highest peak."
    pools: dict[str, int] = {}
    """CUDA stream -> bytes that the allocator holds for it; `reserved` is their sum. Empty if `reserved` was
    not computed by the allocator's model."""
    overhead: dict[str, int]
    "GPU memory outside of the allocator, by category."
    host: dict[str, int]
    "Host memory of a node, by category."
    managed: int = 0
    "Bytes of a rank's paged optimizer states: on the GPU while they fit, else on the host."
    nvme: int = 0
    "Bytes of a rank's scratch files."
    band: float
    "Relative error band of the figures for the GPU."
    correction: float = 1.0
    "Factor for the bytes of tensors: measured / predicted of runs in the ledger."
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
        """Bytes to compare with the GPU's memory."""
        return round(self.reserved * self.correction) + sum(self.overhead.values())

    @property
    def host_per_node(self) -> int:
        return sum(self.host.values())

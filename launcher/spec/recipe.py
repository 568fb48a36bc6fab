"""Recipe: one way to run a job. Nothing else decides how much memory it needs."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from launcher.spec.base import Value

Precision = Literal["fp32", "bf16", "bf16-mixed", "fp16-mixed", "float8"]
Optimizer = Literal[
    "adamw", "adamw-bf16", "adamw-8bit", "paged-adamw-8bit", "lion", "lion-8bit", "adam-mini"
]  # fmt: skip
Sharding = Literal["none", "ddp", "fsdp", "fsdp-keep", "hybrid"]
Offload = Literal["none", "cpu", "cpu-optimizer", "nvme-optimizer"]
Activations = Literal["keep", "selective", "checkpoint", "offload"]
GradSync = Literal["each", "last"]

EIGHT_BIT: frozenset[Optimizer] = frozenset({"adamw-8bit", "paged-adamw-8bit", "lion-8bit"})
SHARDED: frozenset[Sharding] = frozenset({"fsdp", "fsdp-keep", "hybrid"})


class Recipe(Value):
    """Every decision about memory, complete.

    Always: global batch = micro_batch_size x grad_accum x data-parallel ranks.
    """

    precision: Precision
    "fp32; bf16 (pure); bf16-mixed (fp32 shards, bf16 compute); fp16-mixed; float8 (products in the blocks)."
    optimizer: Optimizer
    "Which optimizer, and in how many bits it keeps its states."
    sharding: Sharding
    "none (one device), ddp, fsdp (FSDP2), fsdp-keep (parameters kept after forward), hybrid."
    offload: Offload = "none"
    "none; cpu: parameters, gradients and states; cpu-optimizer or nvme-optimizer: the states alone."
    activations: Activations = "keep"
    "keep all; selective or full recomputation; offload to the CPU."
    checkpoint_ratio: float = Field(1.0, gt=0, le=1)
    "With activations: checkpoint, the part of the blocks that is recomputed, spread evenly."
    micro_batch_size: PositiveInt
    "Samples per rank and forward pass."
    grad_accum: PositiveInt
    "Micro-batches per optimizer step."
    grad_sync: GradSync = "each"
    "Gradients meet with each micro-batch, or with the last only, which keeps them whole on every rank."
    loss_chunks: PositiveInt = 1
    "Parts in which the loss is computed over the vocabulary; 1 builds the whole logits."
    compile: bool = False
    "torch.compile."
    grad_scaler: bool = False
    "Dynamic loss scaling; only fp16 needs it."
    expandable_segments: bool = True
    "PyTorch's CUDA allocator maps memory on demand, which cures most fragmentation."

    def changes_from(self, other: Recipe) -> dict[str, tuple[object, object]]:
        """`{field: (value in other, value here)}` for every field that differs."""
        mine, theirs = self.model_dump(), other.model_dump()
        return {name: (theirs[name], mine[name]) for name in mine if mine[name] != theirs[name]}


class RecipeChoice(Value):
    """What a job file may fix of its Recipe. A field left out is chosen by the planner."""

    precision: Precision | None = None
    optimizer: Optimizer | None = None
    sharding: Sharding | None = None
    offload: Offload | None = None
    activations: Activations | None = None
    checkpoint_ratio: float | None = Field(None, gt=0, le=1)
    micro_batch_size: PositiveInt | None = Field(None, description="samples per rank and forward pass")
    grad_accum: PositiveInt | None = Field(None, description="micro-batches per optimizer step")
    grad_sync: GradSync | None = None
    loss_chunks: PositiveInt | None = None
    compile: bool | None = None
    grad_scaler: bool | None = None
    expandable_segments: bool | None = None

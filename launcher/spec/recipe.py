"""Recipe: the settings that decide how much memory a job needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional

from pydantic import BeforeValidator, Field, PositiveInt, create_model
from pydantic.fields import FieldInfo

from launcher.spec.optimizer_table import OPTIMIZERS
from launcher.spec.value import Value

Precision = Literal["fp32", "bf16", "bf16-mixed", "fp16-mixed", "float8"]
if TYPE_CHECKING:
    Optimizer = str
else:
    Optimizer = Literal[tuple(OPTIMIZERS)]
ZERO = {"zero1": "zero1", "zero2": "fsdp-keep", "zero3": "fsdp"}
"Names from the ZeRO paper (arXiv 1910.02054) that a recipe may use -> the values that they stand for."


def _from_zero_name(name: Any) -> Any:
    if not isinstance(name, str):
        return name
    return ZERO.get(name.lower().replace("-", "").replace("_", ""), name)  # also ZeRO-3


_Sharding = Literal["none", "ddp", "zero1", "fsdp", "fsdp-keep", "fsdp-layers", "hybrid"]
Sharding = Annotated[
    _Sharding, BeforeValidator(_from_zero_name, json_schema_input_type=_Sharding | Literal["zero2", "zero3"])
]
Offload = Literal["none", "cpu", "cpu-optimizer", "nvme-optimizer"]
Activations = Literal["keep", "selective", "every-second", "checkpoint", "budget", "offload", "compress"]
GradSync = Literal["each", "last"]
Schedule = Literal["1f1b", "gpipe", "zero-bubble"]
OptimizerStep = Literal["after", "backward"]
EmbeddingStates = Literal["32-bit", "8-bit"]

APPROXIMATE = (
    "activations: compress: gradients are approximate, because the backward pass reads activations that are "
    "rounded to 8 bits"
)

WHOLE_LOSS = (
    "the task, or its model, computes the loss at once: use loss_chunks: 1. Your own task can compute it in "
    "parts with launcher.train.loss.chunked_cross_entropy, and says so with uses_loss_chunks = True"
)

SHARDED: frozenset[Sharding] = frozenset({"fsdp", "fsdp-keep", "fsdp-layers", "hybrid"})
"FSDP2: each rank has a shard of the parameters, gradients and states."
REPLICATED: frozenset[Sharding] = frozenset({"ddp", "zero1"})
"DDP: each rank has all parameters and gradients."
RECOMPUTED: frozenset[Activations] = frozenset({"selective", "every-second", "checkpoint"})
"Policies that run the forward pass of a block again."


class Recipe(Value):
    """Every decision that changes how much memory a job needs.

    Always: global batch = micro_batch_size x grad_accum x data-parallel ranks, which are
    ranks / (tensor x pipeline).
    """

    precision: Precision
    "Types of parameters and computation."
    optimizer: Optimizer
    "Optimizer and the type of its states."
    embedding_states: EmbeddingStates = "32-bit"
    "With an 8-bit optimizer, the type of the states of embeddings."
    sharding: Sharding
    """How parameters, gradients and states are spread over the ranks. `fsdp-layers` gathers the large linear
    layers of a block one at a time. `zero2` and `zero3` are other names of `fsdp-keep` and `fsdp`."""
    tensor: PositiveInt = 1
    "Tensor parallelism: ranks that compute each layer together, on the same samples. They share a node."
    pipeline: PositiveInt = 1
    "Pipeline parallelism: stages of consecutive blocks, each on its own ranks."
    virtual_stages: PositiveInt = 1
    """Stages on each rank of a pipeline. With n > 1, the `1f1b` schedule is interleaved: a rank holds n parts
    of the model that are not consecutive, and waits an n-th of the time. `grad_accum` must be a multiple of
    `pipeline`."""
    schedule: Schedule = "1f1b"
    """Order in which a stage runs the `grad_accum` micro-batches of a step. With `1f1b` it holds the
    activations of at most `pipeline` micro-batches, with `gpipe` those of all. With `zero-bubble` the stage
    computes the gradients of its blocks' linear layers after those of the activations, when it would
    otherwise wait."""
    stages: tuple[PositiveInt, ...] | None = None
    """Number of blocks of each of the `pipeline` x `virtual_stages` stages. Default: the stage with the most
    parameters has as few as possible."""
    offload: Offload = "none"
    "What moves from the GPU to host memory or NVMe."
    optimizer_step: OptimizerStep = "after"
    """When a parameter is updated: after the backward pass, or in it, as soon as its gradient is complete. In
    the backward pass, no gradient is kept."""
    activations: Activations = "keep"
    "What a block keeps for its backward pass. With `compress`, gradients are approximate."
    checkpoint_ratio: float = Field(1.0, gt=0, le=1)
    "With `activations: checkpoint`, the share of the blocks that is recomputed, spread evenly."
    activation_budget: float = Field(1.0, ge=0, le=1)
    """With `activations: budget`, torch's `activation_memory_budget`: the share of the memory of a compiled
    block's activations that may be kept. 1 keeps what torch.compile keeps, 0 recomputes as much as it can."""
    micro_batch_size: PositiveInt
    "Samples per rank and forward pass."
    grad_accum: PositiveInt
    "Micro-batches per optimizer step."
    grad_sync: GradSync = "each"
    """Whether ranks reduce gradients after each micro-batch or only after the last one. If a job does not
    set it and nothing is planned, launcher uses `last` with `ddp` and `zero1`."""
    loss_chunks: PositiveInt = 1
    "Parts in which the loss over the vocabulary is computed. 1 builds all logits at once."
    compile: bool = False
    "Compile each block with torch.compile. Needs a compiler on the node."
    grad_scaler: bool = False
    "Dynamic loss scaling. launcher sets it with `fp16-mixed`, which needs it; refused with bf16."
    expandable_segments: bool = True
    "Let PyTorch's CUDA allocator map memory on demand, which avoids most fragmentation."

    @property
    def offloads(self) -> bool:
        """Whether the recipe needs host memory for data that would otherwise be on a GPU."""
        return self.offload != "none" or self.activations == "offload"

    @property
    def gradients_leave(self) -> bool:
        """Whether each gradient leaves the GPU in the backward pass, for an optimizer on the host. DDP keeps
        gradients in its buckets. With `hybrid` their memory is freed at the end of the pass."""
        return self.offload in ("cpu-optimizer", "nvme-optimizer") and self.sharding not in REPLICATED

    @property
    def gradients_wait(self) -> bool:
        """Whether gradients wait for the last micro-batch of a step, if anything reduces them."""
        return self.grad_sync == "last" and self.grad_accum > 1

    def changes_from(self, other: Recipe) -> dict[str, tuple[object, object]]:
        """Return `{field: (value in other, value here)}` for every field that differs."""
        new, old = self.model_dump(), other.model_dump()
        return {name: (old[name], new[name]) for name in new if new[name] != old[name]}


def _optional_field(field: FieldInfo) -> tuple[Any, Any]:
    """Return the type and default of the optional RecipeChoice field for a Recipe field."""
    hint, checks = field.annotation, (field.annotation, *field.metadata)
    return Optional[Annotated[checks] if field.metadata else hint], None  # noqa: UP045


if TYPE_CHECKING:

    class RecipeChoice(Value):
        def __getattr__(self, name: str) -> Any: ...

else:
    RecipeChoice = create_model(
        "RecipeChoice",
        __base__=Value,
        __doc__="The fields of a Recipe that a job fixes. The planner chooses the others.",
        __module__=__name__,
        **{name: _optional_field(field) for name, field in Recipe.model_fields.items()},
    )

"""Table of the optimizers that a recipe can name: memory, speed and how a rank builds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

BLOCK = 256
"Elements that share one fp32 scale of an 8-bit state. Fixed by bitsandbytes' kernels."
LEAST_EIGHT_BIT = 4096
"Number of elements. bitsandbytes keeps the states of smaller parameters in 32 bit: `min_8bit_size`."
LEAST_PAGED = 100_000
"Elements of a shard. bitsandbytes does not page smaller states: a managed allocation would cost too much."

State = Literal["as-parameter", "bf16", "fp32-per-row", "8-bit"]
"""How a state is stored. `fp32-per-row`: one number for each row of a parameter. `8-bit`: codes with one
scale per block; fp32 for small parameters, vectors and embeddings."""


@dataclass(frozen=True)
class Optimizer:
    """One optimizer: its cost, its place in the planner's search, and how a rank builds it."""

    name: str
    builder: str
    """`module:name` of the callable that a rank calls with parameter groups, `lr` and `arguments`. Only ranks
    import the module. With 8-bit states it also gets `wide`, the parameters whose states stay in 32 bit."""
    states: tuple[State, ...]
    host_rate: float
    "Parameters/s of one host thread, measured on 16.8 million (torch 2.13, bitsandbytes 0.50.2)."
    arguments: Mapping[str, Any] = field(default_factory=dict)
    temporaries: Callable[[int], int] | None = None
    """`bytes of an element -> bytes per element` that plain operators allocate while they update a parameter.
    None: one fused kernel allocates nothing."""
    row_temporaries: int = 0
    "Bytes per row of a parameter that they allocate in addition. Each element of a vector is a row."
    steps: Literal["device", "host"] | None = "host"
    "Where the fp32 step count of each parameter is stored. None: there is no count."
    order: int | None = None
    "Place in the planner's search, which begins with the smallest loss. None: only a job can ask for it."
    instead: str = "adamw"
    "The nearest optimizer if this one cannot run."
    paged: bool = False
    "Whether its states are those of `instead` in CUDA managed memory. Their checkpoints are interchangeable."

    @property
    def eight_bit(self) -> bool:
        return "8-bit" in self.states


def _widened(itemsize: int) -> int:
    """Return the bytes per element of an fp32 copy. An fp32 tensor needs none."""
    return 0 if itemsize == 4 else 4


DEFAULT = "adamw"
# Host rates: of fused AdamW and of bitsandbytes; for plain operators, of torch's AdamW built from them.
_ROWS = (
    Optimizer(
        "adamw", "torch.optim:AdamW", ("as-parameter", "as-parameter"), 700e6, {"fused": True},
        steps="device", order=0,
    ),
    # torch's states have the parameter's type. A bf16 state that is rounded to nearest never shrinks.
    # Temporaries: the gradient, both moments and noise in 4 bytes each, and the rounded second moment.
    Optimizer(
        "adamw-bf16", "launcher.train.optimizers.adamw_bf16:AdamWBf16", ("bf16", "bf16"), 113e6,
        temporaries=lambda itemsize: _widened(itemsize) + 4 + 4 + 4 + 2, order=3,
    ),
    # bitsandbytes' kernels on local shards: its optimizers fail on DTensor (bitsandbytes#1633). Not torchao:
    # its AdamW8bit decides 8-bit by the local size (ao#4912), fails with bf16 shards (ao#4216) and compiles
    # for 30 s on the CPU.
    Optimizer(
        "adamw-8bit", "launcher.train.optimizers.eight_bit:EightBit", ("8-bit", "8-bit"), 29e6,
        {"kernel": "adam", "betas": (0.9, 0.999)}, order=1,
    ),
    Optimizer(
        "paged-adamw-8bit", "launcher.train.optimizers.eight_bit:EightBit", ("8-bit", "8-bit"), 29e6,
        {"kernel": "adam", "betas": (0.9, 0.999), "paged": True}, order=2, instead="adamw-8bit", paged=True,
    ),
    # torch has no Lion. bitsandbytes' has fp32 states only and fails on DTensor. Lion needs a different
    # learning rate than AdamW, so the planner never chooses it. Temporary: the direction.
    Optimizer(
        "lion", "launcher.train.optimizers.lion:Lion", ("as-parameter",), 113e6,
        temporaries=lambda itemsize: itemsize, steps=None,
    ),
    Optimizer(
        "lion-8bit", "launcher.train.optimizers.eight_bit:EightBit", ("8-bit",), 36e6,
        {"kernel": "lion", "betas": (0.9, 0.99)}, instead="lion",
    ),
    # The authors' package must be told a transformer's shapes. Temporaries: the gradient in fp32 and the
    # update; for each row the mean square and its root.
    Optimizer(
        "adam-mini", "launcher.train.optimizers.adam_mini:AdamMini", ("as-parameter", "fp32-per-row"), 113e6,
        temporaries=lambda itemsize: _widened(itemsize) + 4, row_temporaries=4 + 4, order=4,
    ),
)  # fmt: skip

OPTIMIZERS = {row.name: row for row in _ROWS}
SEARCHED = tuple(row.name for row in sorted(_ROWS, key=lambda row: row.order or 0) if row.order is not None)
"Optimizers that the planner tries, in this order."


def saved_as(name: str) -> str:
    """Return the optimizer with the same checkpoints. A name of another version is returned unchanged."""
    row = OPTIMIZERS.get(name)
    return row.instead if row is not None and row.paged else name


def without_eight_bit(name: str) -> str:
    """Return the nearest optimizer without 8-bit states."""
    while OPTIMIZERS[name].eight_bit:
        name = OPTIMIZERS[name].instead
    return name

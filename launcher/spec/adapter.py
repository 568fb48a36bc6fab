"""Adapter: small trained matrices next to the frozen weights of a model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from launcher.spec.value import Value


class Adapter(Value):
    """Train low-rank matrices instead of the model: LoRA (arXiv 2106.09685) or QLoRA (arXiv 2305.14314).

    A linear layer with weight W then computes `y = x W^T + (alpha / rank) * x A^T B^T`. A is initialised
    randomly, B with zeros.
    """

    kind: Literal["lora", "qlora"]
    """`lora` keeps the frozen weights in the type of the computation. `qlora` stores the linear layers of
    the blocks in 4 bits (bitsandbytes' NF4 with double quantization), about 0.52 bytes per weight."""
    rank: PositiveInt = 16
    "Rows of A and columns of B."
    alpha: PositiveFloat = 32
    "The adapter's output is multiplied by alpha / rank."
    dropout: float = Field(0.0, ge=0, lt=1)
    "Dropout of the adapter's input."
    targets: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Names of the linear layers that get an adapter, or the ends of their names, such as `q_proj`. Default:
    every linear layer of the blocks."""

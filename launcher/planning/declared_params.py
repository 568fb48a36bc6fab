"""The model of a command if only its number of parameters is known."""

from __future__ import annotations

import math

from launcher.memory.shapes import ModelShapes, Parameter
from launcher.memory.states import BF16, FP32, Ranks
from launcher.memory.trace import Trace
from launcher.planning.model_source import About, Args, NoTraceError
from launcher.spec.mesh import WHOLE, Part
from launcher.spec.recipe import Precision, Recipe

ROW = 4096
"Elements per row: a multiple of 8-bit blocks of 256, and as many rows for adam-mini as in common models."
BLOCKS = 32
"Blocks, as in models of about 7 billion parameters. One block is gathered or updated at a time."


class DeclaredParams:
    """A model from `plan.params`: equal blocks of one matrix each.

    Its states are as large as those of any model with this many parameters, rounded up by less than one row,
    and padded by at most one row per block and rank. This does not hold if one matrix is a large part of the
    model, or for embeddings, which 8-bit optimizers keep in 32 bit.
    """

    def __init__(self, params: int, *, batch_norm: bool = False, couples_samples: bool = False) -> None:
        self.params, self.batch_norm, self.couples_samples = params, batch_norm, couples_samples

    def about(self, args: Args | None = None) -> About:
        return About(
            on_meta=True,
            loss_chunks=False,
            batch_norm=self.batch_norm,
            tokens_per_sample=None,
            couples_samples=self.couples_samples,
        )

    def shapes(self, precision: Precision, args: Args | None = None, part: Part = WHOLE) -> ModelShapes:
        rows = math.ceil(self.params / ROW)
        blocks = min(BLOCKS, rows)
        per_block, remainder = divmod(rows, blocks)
        itemsize = BF16 if precision == "bf16" else FP32
        return ModelShapes(
            tuple(
                Parameter(f"blocks.{number}.weight", (per_block + (number < remainder), ROW), itemsize)
                for number in range(blocks)
            ),
            buffers=0,
            blocks=tuple(f"blocks.{number}" for number in range(blocks)),
        )

    def trace(self, recipe: Recipe, ranks: Ranks, args: Args | None = None, *, exact: bool = False) -> Trace:
        """Raises NoTraceError."""
        raise NoTraceError(
            "only the model's number of parameters is known; plan.model: hf:PATH gives its layers"
        )

"""Where the planner's knowledge of a model comes from, without knowing how it is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from launcher.memory.shapes import ModelShapes
from launcher.memory.states import Ranks
from launcher.memory.trace import Trace
from launcher.spec.recipe import Precision, Recipe

Args = Mapping[str, Any]
"Arguments of the task, where they are not the job's own."


class NoTraceError(Exception):
    """The step cannot be traced. The message says why, and what its author can do."""


class About(NamedTuple):
    """What a plan has to know of a task besides its steps."""

    on_meta: bool
    "It builds its model without weights."
    loss_chunks: bool
    "It can compute its loss in parts."
    batch_norm: bool
    tokens_per_sample: int | None
    "That it trains on; None when no tensor of it is a row of integers."
    blocks: bool = True
    "It names blocks, which recomputation and offload of activations work by."
    couples_samples: bool = False
    "The loss of one sample depends on the other samples of its micro-batch."


class Source(Protocol):
    """Each answer may take seconds the first time."""

    def about(self, args: Args | None = None) -> About: ...

    def shapes(self, precision: Precision, args: Args | None = None) -> ModelShapes: ...

    def trace(self, recipe: Recipe, ranks: Ranks, args: Args | None = None, *, exact: bool = False) -> Trace:
        """For recipes that launcher.memory.peaks.traced_as gives, a pass as a law of the micro-batch. It is
        drawn from 2 on: a micro-batch of 1 often has views where others have copies. `exact`: for those of
        completely_traced_as, a complete trace of the very micro-batch.
        Raises NotAffineError where there is no law, and NoTraceError."""

"""The interface through which the planner asks about a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from launcher.memory.shapes import ModelShapes
from launcher.memory.states import Ranks
from launcher.memory.trace import Trace
from launcher.spec.mesh import WHOLE, Part
from launcher.spec.recipe import Precision, Recipe

Args = Mapping[str, Any]
"Task arguments that differ from the job's."


class NoTraceError(Exception):
    """The step cannot be traced. The message says why, and what the task's author can do."""


class NotCompiledError(Exception):
    """torch.compile cannot capture a block as one graph. The message is a sentence for the plan."""


class About(NamedTuple):
    """Properties of a task that a plan needs in addition to its traces."""

    on_meta: bool
    "The task builds its model without weights."
    loss_chunks: bool
    "The task can compute its loss in parts."
    batch_norm: bool
    tokens_per_sample: int | None
    "Number of tokens per sample; None if no tensor of a sample is a row of integers."
    blocks: bool = True
    "The task names blocks, which are the units of recomputation and of activation offload."
    couples_samples: bool = False
    "The loss of one sample depends on the other samples of its micro-batch."
    tensor: bool = False
    "The task says how tensor parallelism splits its model."
    stages: int = 0
    "Largest number of stages into which a pipeline can cut the model: that of its blocks. 0: it cannot."
    linear: bool = True
    "The model's parameters are those of linear layers, embeddings and norms, which the formulas cover."
    recurrent: bool = False
    "The model has an LSTM, GRU or RNN, whose kernels on a GPU are cuDNN's."
    unshardable: str | None = None
    "Why FSDP cannot shard the model; None if it can."
    recomputable: bool = True
    "The forward pass of each block can run again."


class Source(Protocol):
    """Each answer may take seconds the first time."""

    def about(self, args: Args | None = None) -> About: ...

    def shapes(self, precision: Precision, args: Args | None = None, part: Part = WHOLE) -> ModelShapes:
        """Return the shapes of a part of the model."""

    def trace(self, recipe: Recipe, ranks: Ranks, args: Args | None = None, *, exact: bool = False) -> Trace:
        """Trace a recipe.

        Without `exact`, `recipe` comes from launcher.memory.peaks.traced_as, and the trace is affine in the
        micro-batch. It is fitted to micro-batches from 2 on, since a micro-batch of 1 often has views where
        others have copies. With `exact`, `recipe` comes from completely_traced_as, and the trace is complete,
        for the recipe's own micro-batch.

        Raises:
            NotAffineError: The step is not affine in the micro-batch.
            NotCompiledError: `recipe.compile`, and a block cannot be captured as one graph.
            NoTraceError: The step cannot be traced.
            TaskError: loss() does not return (sum, weight), so that no recipe trains.
        """

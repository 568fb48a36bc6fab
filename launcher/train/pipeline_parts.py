"""How a task describes its model, so that launcher can cut it into stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

CHUNKS = "_chunks"
"Attribute of a model that is cut."


@dataclass(frozen=True)
class Pipeline:
    """A model in three parts: `loss(model, batch)` equals `end(middle(begin(batch), batch), batch)`.

    The functions look the modules up in the model whenever they are called, since those of other stages are
    replaced: a replaced block returns its first argument. Each parameter of the model belongs to one of
    `before`, `blocks` and `after`; modules without parameters may be used in every stage.
    """

    begin: Callable[[Any], torch.Tensor]
    "Computes what comes before the blocks: batch -> input of the first block. It runs in the first stage."
    middle: Callable[[torch.Tensor, Any], torch.Tensor]
    """Calls the blocks one after the other: (input of the first block, batch) -> output of the last block. It
    runs in every stage and must not change its input outside the blocks. It may then call modules of `after`,
    such as a last norm. Before the last stage these return their first argument, like blocks of other
    stages."""
    end: Callable[[torch.Tensor, Any], tuple[torch.Tensor, torch.Tensor | float]]
    """Computes what comes after the blocks: (output of the last block, batch) -> sum of the losses, weight.
    It runs in the last stage."""
    before: Sequence[nn.Module]
    "Modules that `begin` uses."
    blocks: Sequence[nn.Module]
    "In the order in which `middle` calls them, each once, from one tensor to one tensor."
    after: Sequence[nn.Module]
    "Modules that `end` uses, or `middle` after the blocks."


def in_turn(blocks: Callable[[], Sequence[nn.Module]]) -> Callable[[torch.Tensor, Any], torch.Tensor]:
    """Return a `middle` that calls the blocks one after the other, with nothing in between."""

    def middle(x: torch.Tensor, _: Any) -> torch.Tensor:
        for block in blocks():
            x = block(x)
        return x

    return middle


def chunks_of(model: nn.Module) -> tuple[Any, ...]:
    """Return each `Chunk` of a model that this rank has, in order; none if the model is not cut."""
    chunks: tuple[Any, ...] = vars(model).get(CHUNKS, ())
    return chunks

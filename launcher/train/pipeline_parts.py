"""What a task says about its model, so that it can be cut into stages."""

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
    "What comes before the blocks: the batch to the input of the first block. It runs in the first stage."
    middle: Callable[[torch.Tensor, Any], torch.Tensor]
    """The blocks, one after the other: the input of the first block, and the batch, to the output of the last
    one. It runs in every stage, and changes nothing but by the blocks. It may go on to call modules of
    `after`, such as a last norm: like blocks of other stages, they return their first argument before the
    last stage."""
    end: Callable[[torch.Tensor, Any], tuple[torch.Tensor, torch.Tensor | float]]
    "What comes after the blocks: to the sum of the losses and its weight. It runs in the last stage."
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
    found: tuple[Any, ...] = vars(model).get(CHUNKS, ())
    return found

"""Pipeline parallelism: which blocks a stage has, and the order in which it runs its micro-batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from launcher.spec.recipe import Recipe

Pass = Literal["forward", "backward"]


def in_flight(recipe: Recipe, stage: int) -> int:
    """Return the number of micro-batches whose activations a stage, counted from 0, holds at the same time.

    GPipe (arXiv 1811.06965) runs all forward passes first. 1F1B (PipeDream-Flush, arXiv 2006.09503) runs a
    backward pass as soon as its gradient can arrive: the last stage holds one micro-batch, the first one as
    many as there are stages.
    """
    if recipe.schedule == "gpipe":
        return recipe.grad_accum
    return min(recipe.pipeline - stage, recipe.grad_accum)


def passes(recipe: Recipe, stage: int) -> Iterator[tuple[Pass, int]]:
    """Yield the passes of a stage in one step, with the index of the micro-batch, both counted from 0."""
    held = in_flight(recipe, stage)
    for index in range(held):
        yield "forward", index
    for index in range(recipe.grad_accum):
        yield "backward", index
        if held + index < recipe.grad_accum:
            yield "forward", held + index


def balanced(blocks: Sequence[int], before: int, after: int, stages: int) -> tuple[int, ...]:
    """Return the number of blocks of each stage so that the largest stage is as small as possible.

    `blocks` are the sizes of the blocks, in parameters or in any other unit. The first stage also has what
    comes before the blocks, and the last one what comes after them. Each stage has at least one block.

    Raises ValueError if there are fewer blocks than stages.
    """
    count = len(blocks)
    if count < stages:
        raise ValueError(f"{count} blocks cannot be divided into {stages} stages")
    sums = [0, *itertools.accumulate(blocks)]
    # cuts[n]: the best cut of the first n blocks into the stages so far. The sum of squares decides between
    # cuts with the same largest stage.
    cuts = {0: _Cut(0, 0, ())}
    for stage in range(stages):
        beside = (before if stage == 0 else 0) + (after if stage == stages - 1 else 0)
        cuts = {
            stop: min(
                cut.with_stage(stop - first, sums[stop] - sums[first] + beside)
                for first, cut in cuts.items()
                if first < stop
            )
            for stop in range(stage + 1, count - (stages - stage - 1) + 1)
        }
    return cuts[count].blocks


class _Cut(NamedTuple):
    largest: int
    squares: int
    blocks: tuple[int, ...]

    def with_stage(self, blocks: int, size: int) -> _Cut:
        return _Cut(max(self.largest, size), self.squares + size * size, (*self.blocks, blocks))

"""Pipeline parallelism: which blocks a stage has, and the order in which it runs its micro-batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from launcher.spec.recipe import Recipe, Schedule

Pass = Literal["forward", "backward"]
BACKWARD_TIME = 2.0
"Time of a backward pass, in times of the forward pass."


class Action(NamedTuple):
    """One pass of a stage."""

    kind: Pass
    micro_batch: int
    "Index in the step, counted from 0."


Table = tuple[tuple[Action, ...], ...]
"The actions of each stage in one step, in order."


class DeadlockError(ValueError):
    """The stages of a schedule would wait for each other."""


def gpipe(stages: int, micro_batches: int) -> Table:
    """Run all forward passes first. Source: arXiv 1811.06965."""
    return tuple(_turns(micro_batches, micro_batches) for _ in range(stages))


def one_f_one_b(stages: int, micro_batches: int) -> Table:
    """Run a backward pass as soon as its gradient can arrive. The last stage holds one micro-batch, the first
    one as many as there are stages. Source: PipeDream-Flush, arXiv 2006.09503."""
    return tuple(_turns(min(stages - stage, micro_batches), micro_batches) for stage in range(stages))


def _turns(first: int, micro_batches: int) -> tuple[Action, ...]:
    """Return `first` forward passes, then backward and forward passes in turn."""
    actions = [Action("forward", index) for index in range(first)]
    for index in range(micro_batches):
        actions.append(Action("backward", index))
        if first + index < micro_batches:
            actions.append(Action("forward", first + index))
    return tuple(actions)


SCHEDULES: dict[Schedule, Callable[[int, int], Table]] = {"1f1b": one_f_one_b, "gpipe": gpipe}


def table_of(recipe: Recipe) -> Table:
    return _table(recipe.schedule, recipe.pipeline, recipe.grad_accum)


@lru_cache
def _table(schedule: Schedule, stages: int, micro_batches: int) -> Table:
    return SCHEDULES[schedule](stages, micro_batches)


def in_flight(recipe: Recipe, stage: int) -> int:
    """Return the largest number of micro-batches whose activations a stage, counted from 0, holds at the same
    time."""
    if recipe.pipeline == 1:
        return 1
    held = itertools.accumulate(1 if one.kind == "forward" else -1 for one in table_of(recipe)[stage])
    return max(held)


def bubble(recipe: Recipe) -> float:
    """Return the time in which a stage waits for others, as a share of the time in which it works."""
    if recipe.pipeline == 1:
        return 0.0
    return _bubble(recipe.schedule, recipe.pipeline, recipe.grad_accum)


@lru_cache
def _bubble(schedule: Schedule, stages: int, micro_batches: int) -> float:
    work = micro_batches * (1.0 + BACKWARD_TIME)
    return max(finish(_table(schedule, stages, micro_batches))) / work - 1.0


def finish(table: Table) -> list[float]:
    """Return when each stage has done its actions, if a forward pass takes 1 and a backward pass
    BACKWARD_TIME.

    A message takes no time, but at most one is on its way between two stages: the next one is sent when the
    one before is received, as in launcher.train.pipeline.channel. Raises DeadlockError.
    """
    clocks, at = [0.0] * len(table), [0] * len(table)
    taken: dict[tuple[int, Action], float] = {}
    "When a stage began an action, for which it received what its neighbour had sent."
    sent: dict[tuple[int, Action], float] = {}
    "When a stage could send the result of an action."
    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(table):
            while at[stage] < len(actions):
                action, kind = actions[at[stage]], actions[at[stage]].kind
                way = 1 if kind == "forward" else -1
                source, target, before = stage - way, stage + way, Action(kind, action.micro_batch - 1)
                begins = clocks[stage]
                if 0 <= source < len(table):
                    if (source, action) not in sent:
                        break
                    begins = max(begins, sent[source, action])
                taken[stage, action] = begins
                ends = begins + (1.0 if kind == "forward" else BACKWARD_TIME)
                if 0 <= target < len(table) and action.micro_batch:
                    if (target, before) not in taken:
                        break
                    ends = max(ends, taken[target, before])
                clocks[stage] = sent[stage, action] = ends
                at[stage] += 1
                moved = True
    waiting = [stage for stage, actions in enumerate(table) if at[stage] < len(actions)]
    if waiting:
        told = ", ".join(f"{stage} in {' '.join(map(str, table[stage][at[stage]]))}" for stage in waiting)
        raise DeadlockError(f"all stages wait: {told}")
    return clocks


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

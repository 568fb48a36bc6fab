"""Pipeline parallelism: which blocks a stage has, and the order in which ranks run their micro-batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from launcher.spec.recipe import Recipe, Schedule

Pass = Literal["forward", "backward", "weights"]
"""`weights`: gradients that the backward pass has postponed, with `zero-bubble`."""
BACKWARD_TIME = 2.0
"Time of a backward pass with all gradients, as a multiple of the forward pass."


class Action(NamedTuple):
    """One pass of a rank."""

    kind: Pass
    micro_batch: int
    "Index in the step, counted from 0."
    chunk: int = 0
    """Which of the rank's stages runs it, counted from 0. Stage s of the model is chunk s // n of rank s % n,
    where n is the recipe's `pipeline`."""


Table = tuple[tuple[Action, ...], ...]
"The actions of each rank of a pipeline in one step, in order."


class DeadlockError(ValueError):
    """The ranks of a schedule would wait for each other."""


def gpipe(ranks: int, micro_batches: int, chunks: int = 1) -> Table:
    """Run all forward passes first. Source: arXiv 1811.06965."""
    return _alternating(ranks, micro_batches, chunks, [micro_batches * chunks] * ranks)


def one_f_one_b(ranks: int, micro_batches: int, chunks: int = 1) -> Table:
    """Run a backward pass as soon as its gradient can arrive. The last rank holds one micro-batch, the first
    one as many as there are ranks. Source: PipeDream-Flush, arXiv 2006.09503.

    With several chunks it is the interleaved schedule of Megatron-LM, arXiv 2104.04473, section 2.2. The
    micro-batches must then be a multiple of the ranks.
    """
    if chunks == 1:
        first = [ranks - rank for rank in range(ranks)]
    else:
        first = [2 * (ranks - rank) - 1 + (chunks - 1) * ranks for rank in range(ranks)]
    return _alternating(ranks, micro_batches, chunks, first)


def zero_bubble(ranks: int, micro_batches: int, chunks: int = 1) -> Table:
    """Run 1F1B, but compute the gradients of weights later: rank r computes them r micro-batches late. They
    fill the time at the end of the step in which the rank would wait. No rank has more unfinished
    micro-batches than the first one. For one chunk.

    Source: ZB-H1 of Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.
    """
    return tuple(
        _with_weights(actions, micro_batches, late=rank)
        for rank, actions in enumerate(one_f_one_b(ranks, micro_batches, chunks))
    )


def _with_weights(actions: Sequence[Action], micro_batches: int, *, late: int) -> tuple[Action, ...]:
    all_actions: list[Action] = []
    for action in actions:
        all_actions.append(action)
        if action.kind == "backward" and action.micro_batch >= late:
            all_actions.append(Action("weights", action.micro_batch - late))
    rest = range(max(0, micro_batches - late), micro_batches)
    return (*all_actions, *(Action("weights", index) for index in rest))


def _alternating(ranks: int, micro_batches: int, chunks: int, first: Sequence[int]) -> Table:
    """Return the table in which each rank first runs the number of forward passes in `first`, then alternates
    backward and forward passes."""
    order = in_groups(ranks, micro_batches, chunks)
    forward = [Action("forward", index, chunk) for index, chunk in order]
    backward = [Action("backward", index, chunks - 1 - chunk) for index, chunk in order]
    return tuple(_alternate(min(number, len(forward)), forward, backward) for number in first)


def in_groups(ranks: int, micro_batches: int, chunks: int) -> list[tuple[int, int]]:
    """Return the order of (micro-batch, chunk) in which a rank runs forward passes: `ranks` micro-batches in
    its first chunk, the same ones in its next chunk, and so on."""
    size = ranks if chunks > 1 else micro_batches
    return [
        (index, chunk)
        for start in range(0, micro_batches, size)
        for chunk in range(chunks)
        for index in range(start, min(start + size, micro_batches))
    ]


def _alternate(first: int, forward: Sequence[Action], backward: Sequence[Action]) -> tuple[Action, ...]:
    rest = itertools.zip_longest(backward, forward[first:])
    return (*forward[:first], *(action for pair in rest for action in pair if action is not None))


SCHEDULES: dict[Schedule, Callable[[int, int, int], Table]] = {
    "1f1b": one_f_one_b,
    "gpipe": gpipe,
    "zero-bubble": zero_bubble,
}


def table_of(recipe: Recipe) -> Table:
    return _table(recipe.schedule, recipe.pipeline, recipe.grad_accum, recipe.virtual_stages)


@lru_cache
def _table(schedule: Schedule, ranks: int, micro_batches: int, chunks: int) -> Table:
    return SCHEDULES[schedule](ranks, micro_batches, chunks)


class ScheduleMoment(NamedTuple):
    """What a rank holds while it runs a pass."""

    kind: Pass
    chunk: int
    held: tuple[int, ...]
    "For each chunk, the number of other micro-batches that wait for their backward pass."
    later: int = 0
    "Other micro-batches that wait for the gradients of weights."
    again: bool = False
    """Whether the rank has gradients of an earlier micro-batch of this step: those of the pass's own chunk,
    or for a forward pass those of any chunk."""


def held_beside(recipe: Recipe, rank: int) -> frozenset[ScheduleMoment]:
    """Return what a rank of the pipeline, counted from 0, holds during the passes of a step.

    A moment is omitted if another one of the same kind holds at least as much of every chunk.
    """
    if recipe.pipeline == 1:
        passes: tuple[Pass, ...] = ("forward", "backward")
        return frozenset(
            ScheduleMoment(kind, 0, (0,), again=again) for kind in passes for again in (False, True)
        )
    return _held_beside(recipe.schedule, recipe.pipeline, recipe.grad_accum, recipe.virtual_stages, rank)


@lru_cache
def _held_beside(
    schedule: Schedule, ranks: int, micro_batches: int, chunks: int, rank: int
) -> frozenset[ScheduleMoment]:
    held, later, with_gradients, moments = [0] * chunks, 0, set[int](), set[ScheduleMoment]()
    for kind, _, chunk in _table(schedule, ranks, micro_batches, chunks)[rank]:
        held[chunk] -= kind == "backward"
        later -= kind == "weights"
        again = bool(with_gradients) if kind == "forward" else chunk in with_gradients
        moments.add(ScheduleMoment(kind, chunk, tuple(held), later, again))
        held[chunk] += kind == "forward"
        if kind == "backward":
            with_gradients.add(chunk)
        later += kind == "backward" and schedule == "zero-bubble"
    return frozenset(one for one in moments if not any(_is_more(other, one) for other in moments))


def _is_more(other: ScheduleMoment, than: ScheduleMoment) -> bool:
    comparable = other != than and (other.kind, other.chunk, other.again) == (
        than.kind,
        than.chunk,
        than.again,
    )
    counts = zip((*other.held, other.later), (*than.held, than.later), strict=True)
    return comparable and all(a >= b for a, b in counts)


def bubble(recipe: Recipe, later: float = 0.5) -> float:
    """Return the time in which a rank waits for others, as a share of the time in which it works.

    `later`: with `zero-bubble`, the share of a backward pass that is postponed.
    """
    if recipe.pipeline == 1:
        return 0.0
    later = round(later, 3) if recipe.schedule == "zero-bubble" else 0.0
    return _bubble(recipe.schedule, recipe.pipeline, recipe.grad_accum, recipe.virtual_stages, later)


@lru_cache
def _bubble(schedule: Schedule, ranks: int, micro_batches: int, chunks: int, later: float) -> float:
    work = micro_batches * chunks * (1.0 + BACKWARD_TIME)
    return max(finish(_table(schedule, ranks, micro_batches, chunks), later)) / work - 1.0


def finish(table: Table, later: float = 0.0) -> list[float]:
    """Return when each rank has done its actions, if a forward pass takes 1 and a backward pass
    BACKWARD_TIME, the share `later` of it in a separate pass.

    A message takes no time, but a link holds at most one message: the next one is sent when the previous one
    is received, as in launcher.train.pipeline.channel. Raises DeadlockError.
    """
    times = {"forward": 1.0, "backward": (1 - later) * BACKWARD_TIME, "weights": later * BACKWARD_TIME}
    clocks, at = [0.0] * len(table), [0] * len(table)
    stages = len(table) * (1 + max(action.chunk for actions in table for action in actions))
    started: dict[tuple[int, Pass, int], float] = {}
    "(stage, kind, micro-batch) -> when the stage received its message and began the pass."
    sent: dict[tuple[int, Pass, int], float] = {}
    "(stage, kind, micro-batch) -> when the stage could send the result of the pass."
    last: dict[tuple[Pass, int, bool], tuple[int, Pass, int]] = {}
    "Link -> what was last sent over it."
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(table):
            while at[rank] < len(actions):
                kind, index, chunk = actions[at[rank]]
                if kind == "weights":
                    clocks[rank] += times[kind]
                    at[rank] += 1
                    moved = True
                    continue
                stage, way = chunk * len(table) + rank, 1 if kind == "forward" else -1
                source, target = ((other, kind, index) for other in (stage - way, stage + way))
                begins = clocks[rank]
                if 0 <= source[0] < stages:
                    if source not in sent:
                        break
                    begins = max(begins, sent[source])
                started[stage, kind, index] = begins
                ends = begins + times[kind]
                if 0 <= target[0] < stages:
                    link = kind, rank, target[0] // len(table) == chunk
                    previous = last.get(link, target)
                    if previous != target:
                        if previous not in started:
                            break
                        ends = max(ends, started[previous])
                    last[link] = target
                clocks[rank] = sent[stage, kind, index] = ends
                at[rank] += 1
                moved = True
    waiting = [rank for rank, actions in enumerate(table) if at[rank] < len(actions)]
    if waiting:
        described = ", ".join(
            f"{rank} in {' '.join(map(str, table[rank][at[rank]][:2]))}" for rank in waiting
        )
        raise DeadlockError(f"all ranks wait: {described}")
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

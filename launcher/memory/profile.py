"""A trace adapted to one kind of recipe, with peaks that are computed once for all micro-batches."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from launcher.memory.shapes import ModelShapes
from launcher.memory.states import BF16, FP32, Ranks
from launcher.memory.trace import (
    ACTIVATIONS,
    BATCH,
    COMPUTE,
    GATHERED,
    GRADIENTS,
    TEMPORARIES,
    Affine,
    Moment,
    Storage,
    Trace,
    Work,
)
from launcher.memory.update import update_temporaries
from launcher.spec.mesh import in_buckets, stages_of
from launcher.spec.optimizers import OPTIMIZERS
from launcher.spec.recipe import SHARDED, Recipe
from launcher.spec.schedule import Beside, held_beside


class Profile:
    """The trace of all recipes with one trace and one `kind`. `profile_of` makes it."""

    def __init__(self, trace: Trace, recipe: Recipe) -> None:
        """`trace`: as the recipe's use of gradients changes it."""
        self.trace, self._recipe = trace, recipe
        self.adds_to_buckets = adds_to_buckets(recipe)
        self._parts: dict[int, dict[str, Affine]] = {}

    @staticmethod
    def kind(recipe: Recipe) -> tuple[bool, bool, str | None]:
        """Return a key: recipes with the same key and the same trace share one profile."""
        updates = recipe.optimizer if recipe.optimizer_step == "backward" else None
        return adds_to_buckets(recipe), leave_the_gpu(recipe), updates

    @cached_property
    def highest(self) -> dict[str, tuple[Moment, ...]]:
        return self.trace.highest(lambda _: True)

    @cached_property
    def highest_but_gradients(self) -> dict[str, tuple[Moment, ...]]:
        """Peaks without gradients, for a pass in which the gradients of earlier micro-batches wait."""
        return self.trace.highest(lambda storage: storage.category != GRADIENTS)

    @cached_property
    def gradients(self) -> int:
        """Bytes of all gradients of a pass."""
        phases = self.trace.highest(lambda storage: storage.category == GRADIENTS)
        return max((moment.fixed for moments in phases.values() for moment in moments), default=0)

    @cached_property
    def on_compute_stream(self) -> Profile:
        """The same without what other streams allocate, except gradients."""
        storages = (
            storage
            if storage.stream == COMPUTE or storage.category == GRADIENTS
            else storage._replace(fixed=0, per_sample=0)
            for storage in self.trace.storages
        )
        return Profile(dataclasses.replace(self.trace, storages=tuple(storages)), self._recipe)

    @cached_property
    def other_streams(self) -> dict[str, tuple[Moment, ...]]:
        """Stream -> the moments at which most is allocated on it, for each stream except the compute
        stream."""
        streams = dict.fromkeys(one.stream for one in self.trace.storages if one.stream != COMPUTE)
        return {stream: self._highest_on(stream) for stream in streams}

    def _highest_on(self, stream: str) -> tuple[Moment, ...]:
        phases = self.trace.highest(lambda one: one.stream == stream)
        return tuple(moment for moments in phases.values() for moment in moments)

    @cached_property
    def batch(self) -> Affine:
        """Bytes of one pass's micro-batch on the device."""
        return per_pass(self.trace, BATCH)

    def parts(self, event: int) -> dict[str, Affine]:
        """Return category -> live bytes after an event."""
        if event not in self._parts:
            sums: dict[str, Affine] = {}
            for number in self.trace.live_at(event):
                fixed, per_sample, category, *_ = self.trace.storages[number]
                before = sums.get(category, Affine(0, 0))
                sums[category] = Affine(before.fixed + fixed, before.per_sample + per_sample)
            self._parts[event] = sums
        return self._parts[event]

    @cached_property
    def of_blocks(self) -> Profile:
        """This profile without the activations and temporaries of embeddings, head and loss."""
        storages = (
            storage
            if storage.category not in (ACTIVATIONS, TEMPORARIES) or _numbered(storage)
            else storage._replace(fixed=0, per_sample=0)
            for storage in self.trace.storages
        )
        return Profile(dataclasses.replace(self.trace, storages=tuple(storages)), self._recipe)

    def module(self, event: int) -> str:
        return self.trace.storages[self.trace.events[event]].module


def profile_of(traces: Sequence[Trace], model: ModelShapes, recipe: Recipe, ranks: Ranks) -> Profile:
    """Return the profile of a recipe. `traces`: of each stage that the rank has; without a pipeline, of the
    model. `model`: in the recipe's precision."""
    trace = in_schedule(traces, held_beside(recipe, ranks.stage))
    leaves = _reduced if recipe.sharding in SHARDED else _is_gradient
    # FSDP2 holds what it has reduced over nodes until the pass ends: FSDPParamGroup._all_reduce_state.
    behind = len(trace.storages) if recipe.sharding == "hybrid" else 0
    if adds_to_buckets(recipe):
        trace = settled(trace)
    elif recipe.optimizer_step == "backward":
        largest, _ = update_temporaries(model, recipe, ranks)
        trace = settled(
            trace,
            lambda gradient: min(largest, _temporaries(recipe, gradient)),
            leaves=leaves,
            behind=behind,
        )
    elif leave_the_gpu(recipe) and recipe.sharding in SHARDED:
        trace = settled(trace, leaves=leaves, behind=behind)
    elif leave_the_gpu(recipe):
        trace = settled(trace, behind=1)
    return Profile(trace, recipe)


def leave_the_gpu(recipe: Recipe) -> bool:
    """Return whether each gradient goes to the host in the backward pass, by launcher or by FSDP2."""
    return recipe.gradients_leave or recipe.offload == "cpu"


def stages_alone(recipe: Recipe, ranks: Ranks) -> list[tuple[Recipe, Ranks]]:
    """Return the recipe and the ranks to trace each stage of a rank by itself: those of a pipeline of more
    ranks, each with one stage."""
    number = recipe.virtual_stages
    alone = recipe.model_copy(update={"pipeline": recipe.pipeline * number, "virtual_stages": 1})
    return [
        (alone, replace(ranks, world=ranks.world * number, stage=stage))
        for stage in stages_of(recipe, ranks.stage)
    ]


def in_schedule(traces: Sequence[Trace], moments: Iterable[Beside]) -> Trace:
    """Return the trace of a micro-batch in all stages of a rank, one stage after the other, beside other
    micro-batches that wait for their backward pass: in each pass as many as take most memory."""
    kept = [[t.storages[number] for number in t.live_at(dict(t.phases)["backward"] - 1)] for t in traces]
    weights = [sum(one.at(1) for one in stage if one.category in _WAITING) for stage in kept]
    most: dict[tuple[str, int], tuple[int, ...]] = {}
    for kind, stage, held in sorted(moments, key=lambda one: sum(map(operator.mul, one.held, weights))):
        most[kind, stage] = held
    merged, nothing = _Merged(traces, kept), [0] * len(traces)
    for phase, _ in traces[0].phases:
        if phase == "evaluation":
            merged.hold(nothing, len(traces))
        merged.phases.append((phase, len(merged.events)))
        backward = phase.startswith("backward")
        for stage in reversed(range(len(traces))) if backward else range(len(traces)):
            if phase != "evaluation":
                merged.hold(most["backward" if backward else "forward", stage], stage)
            merged.run(phase, stage)
        merged.free_gradients()
    merged.hold(nothing, len(traces))
    return Trace(tuple(merged.storages), tuple(merged.events), tuple(merged.phases), work_of(traces))


_WAITING = (ACTIVATIONS, BATCH)


class _Merged:
    """The storages and events of several traces as one."""

    def __init__(self, traces: Sequence[Trace], kept: Sequence[Sequence[Storage]]) -> None:
        """`kept`: the storages of each trace that are alive between its forward and its backward pass."""
        self._traces, self._kept = traces, kept
        self.storages = [storage for trace in traces for storage in trace.storages]
        self._firsts = [0, *itertools.accumulate(len(trace.storages) for trace in traces)]
        self.events: list[int] = []
        self.phases: list[tuple[str, int]] = []
        self._held = [(0, False)] * len(traces)
        self._waiting: list[list[int]] = [[] for _ in traces]
        self._gradients: list[int] = []
        "Gradients that a stage would free at the end of its pass. They stay until the other stages ran too."

    def hold(self, numbers: Sequence[int], stage: int) -> None:
        """Let as many micro-batches of each stage wait, one of which may be the traced one; `stage` runs."""
        for at, number in enumerate(numbers):
            # The traced micro-batch waits itself in the stages before. In the stages behind it does not, and
            # parameters that stay gathered for others are there once.
            held = (number - 1, False) if at < stage and number else (number, at > stage and number > 0)
            if held != self._held[at]:
                self.events += [~one for one in self._waiting[at]]
                self._waiting[at] = [*self._alive(at, *held)]
                self.events += self._waiting[at]
                self._held[at] = held

    def _alive(self, stage: int, number: int, gathered: bool) -> Iterator[int]:
        for one in self._kept[stage]:
            times, category = (number, ACTIVATIONS) if one.category in _WAITING else (gathered, one.category)
            if times and (one.category in _WAITING or one.category == GATHERED):
                yield len(self.storages)
                self.storages.append(
                    one._replace(
                        fixed=times * one.fixed, per_sample=times * one.per_sample, category=category
                    )
                )

    def run(self, phase: str, stage: int) -> None:
        trace, first = self._traces[stage], self._firsts[stage]
        [(start, end)] = [span[1:] for span in trace.spans() if span[0] == phase]
        events = [number + first if number >= 0 else number - first for number in trace.events[start:end]]
        while events and events[-1] < 0 and self.storages[~events[-1]].category == GRADIENTS:
            self._gradients.append(events.pop())
        self.events += events

    def free_gradients(self) -> None:
        self.events += reversed(self._gradients)
        self._gradients.clear()


def _sum(sizes: Iterable[Affine]) -> Affine:
    """Return the sum of affine quantities."""
    fixed, per_sample = map(sum, zip(*sizes, strict=True))
    return Affine(fixed, per_sample)


def adds_to_buckets(recipe: Recipe) -> bool:
    """Return whether each gradient is added to DDP's bucket at once.

    With `grad_sync: last`, gradients wait beside the buckets until the last micro-batch.
    """
    return in_buckets(recipe) and not (recipe.grad_sync == "last" and recipe.grad_accum > 1)


def per_pass(trace: Trace, category: str) -> Affine:
    """Return the bytes of all storages of a category that one pass allocates."""
    return _summed(trace, [storage for storage in trace.storages if storage.category == category])


class Kept(NamedTuple):
    """Bytes that a forward pass keeps for the backward pass."""

    everywhere: Affine
    in_blocks: Affine | None
    "Bytes kept in the numbered blocks; None if there are none."


def work_of(traces: Sequence[Trace]) -> Work:
    """Return the work of one micro-batch in all stages of a rank."""
    return Work(*(_sum(of) for of in zip(*(trace.work for trace in traces), strict=True)))


def kept_of(traces: Sequence[Trace]) -> Kept:
    """`traces`: as for `profile_of`."""
    kept = [(t, [one for one in t.storages if one.category == ACTIVATIONS]) for t in traces]
    inside = [(t, [one for one in some if _numbered(one)]) for t, some in kept]
    everywhere, in_blocks = (_sum(_summed(t, some) for t, some in each) for each in (kept, inside))
    return Kept(everywhere, in_blocks if any(some for _, some in inside) else None)


def _numbered(storage: Storage) -> bool:
    return any(part.isdigit() for part in storage.module.split("."))


def _summed(trace: Trace, storages: list[Storage]) -> Affine:
    passes = sum(name.startswith("forward") for name, _ in trace.phases)
    return Affine(
        sum(one.fixed for one in storages) / passes, sum(one.per_sample for one in storages) / passes
    )


def _temporaries(recipe: Recipe, gradient: int) -> int:
    """Return the bytes of temporaries of an update of all parameters with a gradient of so many bytes."""
    each = OPTIMIZERS[recipe.optimizer].temporaries
    itemsize = BF16 if recipe.precision == "bf16" else FP32
    return gradient // itemsize * each(itemsize, False) if each is not None else 0


def _is_gradient(storage: Storage) -> bool:
    return storage.category == GRADIENTS


def _reduced(storage: Storage) -> bool:
    """Return whether this is a gradient that FSDP has reduced: whole ones are on the compute stream."""
    return _is_gradient(storage) and storage.stream != COMPUTE


def settled(
    trace: Trace,
    update: Callable[[int], int] = lambda _: 0,
    *,
    leaves: Callable[[Storage], bool] = _is_gradient,
    behind: int = 0,
) -> Trace:
    """Return a trace in which each gradient is freed before the next allocation: DDP adds it to a bucket,
    `optimizer_step: backward` uses it at once, and for an optimizer on the host it leaves the GPU.

    `update`: bytes of a gradient -> bytes that its use allocates for a moment. `leaves`: returns whether a
    storage is such a gradient. `behind`: number of later gradients in the pass for which each one waits.
    """
    storages = list(trace.storages)
    events: list[int] = []
    starts = {start for _, start in trace.phases}
    moved: dict[int, int] = {}
    dying: list[int] = []
    for index, event in enumerate(trace.events):
        if index in starts:
            events += [~one for one in dying]
            dying = []
            moved[index] = len(events)
        number = event if event >= 0 else ~event
        gradient = leaves(trace.storages[number])
        if event >= 0:
            free = max(0, len(dying) - behind)
            events += [~one for one in dying[:free]] + [event]
            dying = dying[free:]
            if gradient:
                dying.append(event)
                if size := update(int(trace.storages[event].fixed)):
                    used = trace.storages[event]._replace(fixed=size, per_sample=0, category=TEMPORARIES)
                    events += [len(storages), ~len(storages)]
                    storages.append(used)
        elif not gradient:
            events.append(event)
    events += [~one for one in dying]
    phases = tuple((name, moved.get(start, len(events))) for name, start in trace.phases)
    return Trace(tuple(storages), tuple(events), phases, trace.work)

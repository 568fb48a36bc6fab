"""A trace adapted to one kind of recipe, with peaks that are computed once for all micro-batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

from launcher.memory.shapes import ModelShapes
from launcher.memory.states import BF16, FP32, Ranks
from launcher.memory.trace import (
    ACTIVATIONS,
    BATCH,
    COMPUTE,
    GRADIENTS,
    TEMPORARIES,
    Affine,
    Moment,
    Storage,
    Trace,
)
from launcher.memory.update import update_temporaries
from launcher.spec.optimizers import OPTIMIZERS
from launcher.spec.recipe import REPLICATED, SHARDED, Recipe
from launcher.spec.schedule import in_flight


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


def profile_of(trace: Trace, model: ModelShapes, recipe: Recipe, ranks: Ranks) -> Profile:
    """Return the profile of a recipe's trace. `model`: in the recipe's precision."""
    leaves = _reduced if recipe.sharding in SHARDED else _is_gradient
    # FSDP2 holds what it has reduced over nodes until the pass ends: FSDPParamGroup._all_reduce_state.
    behind = len(trace.storages) if recipe.sharding == "hybrid" else 0
    if (others := in_flight(recipe, ranks.stage) - 1) > 0:
        trace = beside_others(trace, others)
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


def beside_others(trace: Trace, others: int) -> Trace:
    """Return the trace of a micro-batch of a pipeline, beside `others` that wait for their backward pass."""
    phases = dict(trace.phases)
    alive = trace.live_at(phases["backward"] - 1)
    kept = [trace.storages[n] for n in alive if trace.storages[n].category in (ACTIVATIONS, BATCH)]
    waiting = [
        one._replace(fixed=others * one.fixed, per_sample=others * one.per_sample, category=ACTIVATIONS)
        for one in kept
    ]
    numbers = range(len(trace.storages), len(trace.storages) + len(waiting))
    end = phases.get("evaluation", len(trace.events))
    events = (*numbers, *trace.events[:end], *(~number for number in numbers), *trace.events[end:])
    starts = {"forward": 0, "evaluation": end + 2 * len(waiting)}
    moved = tuple((name, starts.get(name, start + len(waiting))) for name, start in trace.phases)
    return Trace((*trace.storages, *waiting), events, moved, trace.work)


def adds_to_buckets(recipe: Recipe) -> bool:
    """Return whether each gradient is added to DDP's bucket at once.

    With `grad_sync: last`, gradients wait beside the buckets until the last micro-batch.
    """
    return recipe.sharding in REPLICATED and not (recipe.grad_sync == "last" and recipe.grad_accum > 1)


def per_pass(trace: Trace, category: str) -> Affine:
    """Return the bytes of all storages of a category that one pass allocates."""
    return _summed(trace, [storage for storage in trace.storages if storage.category == category])


class Kept(NamedTuple):
    """Bytes that a forward pass keeps for the backward pass."""

    everywhere: Affine
    in_blocks: Affine | None
    "Bytes kept in the numbered blocks; None if there are none."


def kept_of(trace: Trace) -> Kept:
    kept = [storage for storage in trace.storages if storage.category == ACTIVATIONS]
    inside = [storage for storage in kept if _numbered(storage)]
    return Kept(_summed(trace, kept), _summed(trace, inside) if inside else None)


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

"""A trace adapted to one kind of recipe, with peaks that are computed once for all micro-batches."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from launcher.memory.optimizer_temporaries import temporaries_of
from launcher.memory.shapes import ModelShapes
from launcher.memory.states import Ranks, computes_in, updated_by
from launcher.memory.trace import (
    ACTIVATIONS,
    ALL_GATHER,
    BATCH,
    COMPLETE,
    COMPUTE,
    GATHERED,
    GRADIENTS,
    LATER,
    TEMPORARIES,
    Affine,
    Moment,
    Storage,
    Trace,
    Work,
)
from launcher.spec.mesh import in_buckets, stages_of
from launcher.spec.pipeline_schedule import ScheduleMoment, held_beside
from launcher.spec.recipe import SHARDED, Recipe

SCALAR = 8
"Maximum bytes of one number."


class Profile:
    """A trace in the form that all recipes with the same `key` share. `profile_of` makes it."""

    def __init__(
        self,
        trace: Trace,
        model: ModelShapes,
        recipe: Recipe,
        again: Trace | None = None,
        whole: Profile | None = None,
        excluded: Callable[[Storage], bool] = lambda _: False,
    ) -> None:
        """`trace`: changed for what the recipe does with gradients. `again`: the trace of a pass that runs
        while gradients of earlier micro-batches exist, if it differs. `whole`: the profile that this one is a
        part of, without the storages for which `excluded` returns True."""
        self.trace, self.model, self._recipe = trace, model, recipe
        self._again = again if again is not None else trace
        self._whole, self._excluded = whole, excluded
        self.adds_to_buckets = adds_to_buckets(recipe)
        self._parts: dict[int, dict[str, Affine]] = {}

    def _without(self, excluded: Callable[[Storage], bool]) -> Profile:
        return Profile(self.trace, self.model, self._recipe, self._again, self, excluded)

    @cached_property
    def _counted(self) -> Sequence[Storage | None]:
        """The trace's storages, with None in place of each one that is left out."""
        if self._whole is None:
            return self.trace.storages
        return [None if s is None or self._excluded(s) else s for s in self._whole._counted]

    @staticmethod
    def key(recipe: Recipe) -> tuple[bool, bool, bool, str | None]:
        """Return a key: recipes with the same key and the same trace share one profile."""
        updates = recipe.optimizer if recipe.optimizer_step == "backward" else None
        return adds_to_buckets(recipe), leave_the_gpu(recipe), recipe.offload == "cpu", updates

    @cached_property
    def highest(self) -> dict[str, tuple[Moment, ...]]:
        return self.trace.highest(self._counted)

    @cached_property
    def again(self) -> Profile:
        """This profile for a pass that runs while gradients of earlier micro-batches exist. It excludes
        them."""
        whole = self._whole.again if self._whole is not None else None
        return Profile(self._again, self.model, self._recipe, None, whole, self._excluded)

    @cached_property
    def gradients(self) -> int:
        """Bytes of all gradients of a pass."""
        return max(
            (moment.fixed for moment in self._highest_of(lambda s: s.category == GRADIENTS)), default=0
        )

    def _highest_of(self, wanted: Callable[[Storage], bool]) -> list[Moment]:
        """Return the moments at which the wanted storages alone take the most bytes."""
        counted = [s if s is not None and wanted(s) else None for s in self._counted]
        return [moment for moments in self.trace.highest(counted).values() for moment in moments]

    @cached_property
    def on_compute_stream(self) -> Profile:
        """This profile without what other streams allocate."""
        return self._without(lambda s: s.stream != COMPUTE)

    @cached_property
    def other_streams(self) -> dict[str, list[Moment]]:
        """Stream -> the moments at which most is allocated on it, for each stream except the compute
        stream."""
        if self._whole is not None and self._off_compute == self._whole._off_compute:
            return self._whole.other_streams
        streams = dict.fromkeys(storage.stream for storage in self._off_compute)
        return {stream: self._highest_on(stream) for stream in streams}

    @cached_property
    def _off_compute(self) -> list[Storage]:
        """The storages that are not on the compute stream."""
        return [s for s in self._counted if s is not None and s.stream != COMPUTE]

    def _highest_on(self, stream: str) -> list[Moment]:
        return self._highest_of(lambda s: s.stream == stream)

    @cached_property
    def batch(self) -> Affine:
        """Bytes of one pass's micro-batch on the device."""
        return per_pass(self.trace, BATCH)

    @cached_property
    def left(self) -> Affine:
        """Bytes of activations that the model holds after a step, in attributes, until the next step replaces
        them."""
        ends = [end for name, _, end in self.trace.spans() if name.startswith("backward")]
        numbers = self.trace.live_at(max(ends) - 1) if ends else []
        live = (storage for number in numbers if (storage := self._counted[number]) is not None)
        # The sums of losses and weights are gone before the update.
        kept = [s for s in live if s.category == ACTIVATIONS and s.at(1) > SCALAR]
        return Affine(sum(s.fixed for s in kept), sum(s.per_sample for s in kept))

    def parts(self, event: int) -> dict[str, Affine]:
        """Return category -> live bytes after an event."""
        if event not in self._parts:
            sums: dict[str, tuple[int, int]] = {}
            for number in self.trace.live_at(event):
                if (s := self._counted[number]) is not None:
                    fixed, per_sample = sums.get(s[2], (0, 0))
                    sums[s[2]] = fixed + s[0], per_sample + s[1]
            self._parts[event] = {category: Affine(*size) for category, size in sums.items()}
        return self._parts[event]

    @cached_property
    def of_blocks(self) -> Profile:
        """This profile without the activations and temporaries of embeddings, head and loss."""
        in_block = self.model.in_block
        return self._without(lambda s: s.category in (ACTIVATIONS, TEMPORARIES) and not in_block(s.module))

    @cached_property
    def beside_blocks(self) -> Profile:
        """This profile without what the blocks keep for the backward pass."""
        in_block = self.model.in_block
        return self._without(lambda s: s.category == ACTIVATIONS and in_block(s.module))

    def module(self, event: int) -> str:
        return self.trace.storages[self.trace.events[event]].module


def profile_of(traces: Sequence[Trace], model: ModelShapes, recipe: Recipe, ranks: Ranks) -> Profile:
    """Return the profile of a recipe. `traces`: of each stage that the rank has; without a pipeline, of the
    model. `model`: in the recipe's precision; the profile has it with the gradients of the traces."""
    complete = frozenset[str]().union(*(trace.complete for trace in traces))
    model = model.without_gradients({p.name for p in model.trained} - complete)
    moments = held_beside(recipe, ranks.stage)
    if adds_to_buckets(recipe) or leave_the_gpu(recipe):  # in each pass there are as many gradients
        moments = frozenset(moment._replace(again=again) for moment in moments for again in (False, True))
    if recipe.offload == "cpu" and ranks.on_gpu:
        cast = any(p.itemsize > computes_in(recipe) for p in model.parameters)
        traces = [with_shards_from_host(trace, ranks.shards(recipe), cast=cast) for trace in traces]
    trace = in_schedule(traces, moments)
    if recipe.optimizer_step == "backward":
        return Profile(with_updates(trace, model, recipe, ranks), model, recipe)
    if adds_to_buckets(recipe) or (leave_the_gpu(recipe) and recipe.sharding in SHARDED):
        return Profile(trace, model, recipe)
    if leave_the_gpu(recipe):
        return Profile(leaving_late(trace), model, recipe)
    again = in_schedule(traces, moments, again=True)
    return Profile(kept_to_the_end(trace, recipe), model, recipe, again)


def leave_the_gpu(recipe: Recipe) -> bool:
    """Return whether each gradient goes to the host in the backward pass, by launcher or by FSDP2."""
    return recipe.gradients_leave or recipe.offload == "cpu"


def stages_alone(recipe: Recipe, ranks: Ranks) -> list[tuple[Recipe, Ranks]]:
    """Return the recipe and the ranks with which to trace each stage of a rank separately: in a pipeline of
    more ranks with one stage each."""
    number = recipe.virtual_stages
    alone = recipe.model_copy(update={"pipeline": recipe.pipeline * number, "virtual_stages": 1})
    return [
        (alone, replace(ranks, world=ranks.world * number, stage=stage))
        for stage in stages_of(recipe, ranks.stage)
    ]


def in_schedule(traces: Sequence[Trace], moments: Iterable[ScheduleMoment], *, again: bool = False) -> Trace:
    """Return the trace of one micro-batch in all stages of a rank, one stage after the other.

    Meanwhile, other micro-batches wait for their backward pass or for weight gradients. Each pass includes
    the waiting micro-batches of the moment at which they need the most memory. `again`: every pass runs while
    gradients of earlier micro-batches exist, like the phases whose names end with ` again`.
    """
    kept = [_live_before(trace, "backward") for trace in traces]
    if LATER in dict(traces[0].phases):
        left = (s for s in _live_before(traces[0], LATER) if s.category in _LEFT)
        kept.append([storage._replace(category=ACTIVATIONS) for storage in left])
    weights = [sum(s.at(1) for s in storages if s.category in _WAITING) for storages in kept]
    numbers = [((m.kind, m.chunk, m.again), (*m.held, m.later)[: len(kept)]) for m in moments]
    most: dict[tuple[str, int, bool], tuple[int, ...]] = {}
    # Equal stages take as much in another order of numbers. The largest tuple then counts in every process:
    # the order of a set does not.
    for key, held in sorted(numbers, key=lambda pair: (sum(map(operator.mul, pair[1], weights)), pair[1])):
        most[key] = held
    merged, nothing = _Merged(traces, kept), (0,) * len(kept)
    for phase, _ in traces[0].phases:
        if phase == "evaluation":
            merged.hold(nothing, len(traces))
            merged.evaluate()
            continue
        merged.phases.append((phase, len(merged.events)))
        backward = phase.startswith("backward")
        kind = "weights" if phase.startswith(LATER) else "backward" if backward else "forward"
        for stage in reversed(range(len(traces))) if backward else range(len(traces)):
            merged.hold(most.get((kind, stage, again or phase.endswith(" again")), nothing), stage)
            merged.run(phase, stage)
    merged.hold(nothing, len(traces))
    return Trace(tuple(merged.storages), tuple(merged.events), tuple(merged.phases), work_of(traces))


_WAITING = (ACTIVATIONS, BATCH)
_LEFT = (*_WAITING, TEMPORARIES)
"Storages that wait for weight gradients: inputs of layers, and gradients of their outputs."


def _live_before(trace: Trace, phase: str) -> list[Storage]:
    return [trace.storages[number] for number in trace.live_at(dict(trace.phases)[phase] - 1)]


class _Merged:
    """The storages and events of several traces as one."""

    def __init__(self, traces: Sequence[Trace], kept: Sequence[Sequence[Storage]]) -> None:
        """`kept`: for each trace the storages that are alive between its forward and its backward pass. One
        more list has those that wait for weight gradients, if there are any."""
        self._traces, self._kept = traces, kept
        self.storages = [storage for trace in traces for storage in trace.storages]
        self._firsts = [0, *itertools.accumulate(len(trace.storages) for trace in traces)]
        self.events: list[int] = []
        self.phases: list[tuple[str, int]] = []
        self._held = [(0, False)] * len(kept)
        self._waiting: list[list[int]] = [[] for _ in kept]

    def hold(self, numbers: Sequence[int], stage: int) -> None:
        """Set how many micro-batches of each stage wait while `stage` runs. One may be the traced one."""
        for at, number in enumerate(numbers):
            # In earlier stages, the traced micro-batch is one of those that wait. Later stages have only
            # others, and the parameters that stay gathered for them, once.
            held = (number - 1, False) if at < stage and number else (number, at > stage and number > 0)
            if held != self._held[at]:
                self.events += [~one for one in self._waiting[at]]
                self._waiting[at] = [*self._alive(at, *held)]
                self.events += self._waiting[at]
                self._held[at] = held

    def _alive(self, stage: int, number: int, gathered: bool) -> Iterator[int]:
        for storage in self._kept[stage]:
            waits = storage.category in _WAITING
            times, category = (number, ACTIVATIONS) if waits else (gathered, storage.category)
            if times and (waits or storage.category == GATHERED):
                yield len(self.storages)
                self.storages.append(
                    storage._replace(
                        fixed=times * storage.fixed,
                        per_sample=times * storage.per_sample,
                        category=category,
                    )
                )

    def run(self, phase: str, stage: int) -> None:
        self.events += self._events(phase, stage)

    def evaluate(self) -> None:
        """Run all stages without gradients. A stage's last message stays until another stage sends one.

        A stage's trace begins with that message if the stage sends any, otherwise with the batch.
        """
        self.phases.append(("evaluation", len(self.events)))
        sent: list[int] = []
        for stage in range(len(self._traces)):
            events = self._events("evaluation", stage)
            births = [event for event in events if event >= 0]
            if births and self.storages[births[0]].category != BATCH:
                self.events += [~one for one in sent]
                sent = births[:1] if stage < len(self._traces) - 1 else []
            self.events += [event for event in events if ~event not in sent]
        self.events += [~one for one in sent]

    def _events(self, phase: str, stage: int) -> list[int]:
        trace, first = self._traces[stage], self._firsts[stage]
        [(start, end)] = [span[1:] for span in trace.spans() if span[0] == phase]
        return [number + first if number >= 0 else number - first for number in trace.events[start:end]]


def _sum(sizes: Iterable[Affine]) -> Affine:
    """Return the sum of affine quantities."""
    fixed, per_sample = map(sum, zip(*sizes, strict=True))
    return Affine(fixed, per_sample)


def adds_to_buckets(recipe: Recipe) -> bool:
    """Return whether each gradient is added to DDP's bucket at once.

    With `grad_sync: last`, gradients wait outside the buckets until the last micro-batch.
    """
    return in_buckets(recipe) and not recipe.gradients_wait


def per_pass(trace: Trace, category: str) -> Affine:
    """Return the bytes of all storages of a category that one pass allocates."""
    return _summed(trace, [storage for storage in trace.storages if storage.category == category])


class Kept(NamedTuple):
    """Bytes that a forward pass keeps for the backward pass."""

    everywhere: Affine
    in_blocks: Affine | None
    "Bytes kept in the blocks; None if there are none."


def work_of(traces: Sequence[Trace]) -> Work:
    """Return the work of one micro-batch in all stages of a rank."""
    return Work(*(_sum(of) for of in zip(*(trace.work for trace in traces), strict=True)))


def kept_of(traces: Sequence[Trace], model: ModelShapes) -> Kept:
    """Return what the forward pass keeps. Arguments as for `profile_of`."""
    kept = [(t, [s for s in t.storages if s.category == ACTIVATIONS]) for t in traces]
    inside = [(t, [s for s in storages if model.in_block(s.module)]) for t, storages in kept]
    everywhere, in_blocks = (_sum(_summed(t, storages) for t, storages in each) for each in (kept, inside))
    return Kept(everywhere, in_blocks if any(storages for _, storages in inside) else None)


def _summed(trace: Trace, storages: list[Storage]) -> Affine:
    passes = sum(name.startswith("forward") for name, _ in trace.phases)
    return Affine(sum(s.fixed for s in storages) / passes, sum(s.per_sample for s in storages) / passes)


def with_updates(trace: Trace, model: ModelShapes, recipe: Recipe, ranks: Ranks) -> Trace:
    """Return the trace with the temporaries of `optimizer_step: backward`, which updates each parameter when
    its gradient is complete."""
    needs = {p.name: temporaries_of(recipe, p, updated_by(p, recipe, ranks)) for p in model.trained}
    most = max(needs.values(), default=0)
    storages = (
        storage._replace(fixed=needs.get(storage.module, most), category=TEMPORARIES)
        if storage.category == COMPLETE
        else storage
        for storage in trace.storages
    )
    return dataclasses.replace(trace, storages=tuple(storages))


def with_shards_from_host(trace: Trace, shards: int, *, cast: bool) -> Trace:
    """Return the trace in which each all-gather begins with copies of a rank's shards from the host.

    FSDP2 holds them until they are in the all-gather's buffer: FSDPParam.all_gather_inputs in
    torch/distributed/fsdp/_fully_shard/_fsdp_param.py. If parameters are `cast`, the trace has such copies:
    without offload, FSDP2 casts all shards into one tensor of that size. A copy from the host is freed once
    it is cast, before the larger buffer is allocated, so it adds nothing to the peak.
    """
    storages, events, phases = list(trace.storages), list[int](), list[tuple[str, int]]()
    for phase, start, end in trace.spans():
        phases.append((phase, len(events)))
        gathers = [
            event for event in trace.events[start:end] if event >= 0 and _in_all_gather(storages[event])
        ]
        pairs = pairwise(gathers) if cast else ()
        copied = [(a, b) for a, b in pairs if storages[a].fixed * shards == storages[b].fixed]
        uncopied = {*gathers}.difference(*copied)
        for event in trace.events[start:end]:
            if event not in uncopied:
                events.append(event)
                continue
            events += [len(storages), event, ~len(storages)]
            storages.append(storages[event]._replace(fixed=round(storages[event].fixed / shards)))
    return dataclasses.replace(trace, storages=tuple(storages), events=tuple(events), phases=tuple(phases))


def _in_all_gather(storage: Storage) -> bool:
    return storage.category == GATHERED and storage.stream == ALL_GATHER


def leaving_late(trace: Trace) -> Trace:
    """Return the trace in which each gradient is freed when the next one is complete: until then
    launcher.train.optimizers.host_gradients copies it to the host."""
    last: int | None = None

    def free(event: int, storage: Storage) -> list[int]:
        nonlocal last
        if storage.category != GRADIENTS:
            return [event]
        before, last = last, event
        return [] if before is None else [before]

    def at_end(_: str) -> list[int]:
        nonlocal last
        before, last = last, None
        return [] if before is None else [before]

    return _freed_otherwise(trace, free, at_end)


def kept_to_the_end(trace: Trace, recipe: Recipe) -> Trace:
    """Return the trace in which gradients stay until the step's last backward pass ends."""
    kept: list[int] = []

    def free(event: int, storage: Storage) -> list[int]:
        # On the compute stream, FSDP's gradients are whole ones that wait to be reduced.
        stays = storage.category == GRADIENTS and not (
            recipe.sharding in SHARDED and storage.stream == COMPUTE
        )
        if stays:
            kept.append(event)
        return [] if stays else [event]

    return _freed_otherwise(trace, free, lambda phase: kept if phase == trace.last_backward else [])


def _freed_otherwise(
    trace: Trace, free: Callable[[int, Storage], list[int]], at_end: Callable[[str], list[int]]
) -> Trace:
    """Return the trace with the events `free(event, storage)` in place of each free, and `at_end(phase)` at
    the end of each phase."""
    events: list[int] = []
    phases: list[tuple[str, int]] = []
    for phase, start, end in trace.spans():
        phases.append((phase, len(events)))
        for event in trace.events[start:end]:
            events += [event] if event >= 0 else free(event, trace.storages[~event])
        events += at_end(phase)
    return dataclasses.replace(trace, events=tuple(events), phases=tuple(phases))

"""What one rank allocates in a training step, in order, as plain values: no torch, no sizes fixed yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

GATHERED, GRADIENTS, ACTIVATIONS = "gathered parameters", "gradients", "activations"
TEMPORARIES, COMMUNICATION, BATCH = "temporaries", "communication", "batch"
COMPUTE, ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "compute", "all-gather", "reduce-scatter", "all-reduce"
"""CUDA streams. FSDP2 allocates each all-gather's output on one stream of its own, and each sharded gradient
on another one (FSDPCommContext in torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py)."""


class NotAffineError(ValueError):
    """Two traces of one step are not the same but for their sizes."""


class Law(NamedTuple):
    """`fixed + per_sample x micro-batch`."""

    fixed: float
    per_sample: float

    def at(self, micro_batch: int) -> float:
        return self.fixed + self.per_sample * micro_batch


class Storage(NamedTuple):
    """One allocation: `fixed + per_sample x micro-batch` bytes."""

    fixed: int
    per_sample: int
    category: str
    module: str
    "The module that ran when it was allocated; the model's class for the root, `loss` outside of all."
    stream: str = COMPUTE
    "The CUDA stream that was current. PyTorch's allocator reuses its memory only on this stream."

    def at(self, micro_batch: int) -> int:
        return self.fixed + self.per_sample * micro_batch


class Work(NamedTuple):
    """Of one micro-batch on one rank."""

    forward_flops: Law
    backward_flops: Law
    "With what is computed again."
    forward_bytes: Law
    "Memory traffic: what each kernel reads and writes."
    backward_bytes: Law


class Moment(NamedTuple):
    """Live bytes after one event."""

    fixed: int
    per_sample: int
    event: int

    def at(self, micro_batch: int) -> int:
        return self.fixed + self.per_sample * micro_batch


@dataclass(frozen=True)
class Trace:
    """A pass forward and backward, and in a complete trace a second one with the gradients of the first,
    where the recipe accumulates, and an evaluation. Not in it: sharded parameters, buffers, states of the
    optimizer."""

    storages: tuple[Storage, ...]
    events: tuple[int, ...]
    "i >= 0: storage i is allocated. ~i: it is freed."
    phases: tuple[tuple[str, int], ...]
    "(name, its first event): forward, backward, forward again, backward again, evaluation."
    work: Work

    def spans(self) -> Iterator[tuple[str, int, int]]:
        """(phase, first event, event after its last)"""
        ends = [start for _, start in self.phases[1:]] + [len(self.events)]
        for (name, start), end in zip(self.phases, ends, strict=True):
            yield name, start, end

    def highest(self, counts: Callable[[Storage], bool] = lambda _: True) -> dict[str, tuple[Moment, ...]]:
        """For each phase the moments that are its peak for some micro-batch. Sizes as asked for, without
        the allocator's rounding. `counts`: whether a storage is on the GPU."""
        moments: dict[str, tuple[Moment, ...]] = {}
        sizes = [(one.fixed, one.per_sample) if counts(one) else None for one in self.storages]
        fixed = per_sample = 0
        for name, start, end in self.spans():
            best: dict[int, tuple[int, int]] = {}
            for event in range(start, end):
                number = self.events[event]
                size = sizes[number if number >= 0 else ~number]
                if size is None:
                    continue
                if number < 0:
                    fixed -= size[0]
                    per_sample -= size[1]
                    continue
                fixed += size[0]
                per_sample += size[1]
                if per_sample not in best or fixed > best[per_sample][0]:
                    best[per_sample] = fixed, event
            moments[name] = _not_below_another(Moment(most, each, at) for each, (most, at) in best.items())
        return moments

    def live_at(self, event: int) -> list[int]:
        """Numbers of the storages that are alive after this event."""
        alive: dict[int, None] = {}
        for number in self.events[: event + 1]:
            if number >= 0:
                alive[number] = None
            else:
                del alive[~number]
        return list(alive)


def _not_below_another(moments: Iterable[Moment]) -> tuple[Moment, ...]:
    kept: list[Moment] = []
    for moment in sorted(moments, key=lambda one: (-one.per_sample, -one.fixed)):
        if not kept or moment.fixed > kept[-1].fixed:
            kept.append(moment)
    return tuple(kept)


class Work4(NamedTuple):
    """FLOPs and bytes, forward and backward, of one traced micro-batch."""

    forward_flops: float
    backward_flops: float
    forward_bytes: float
    backward_bytes: float


@dataclass(frozen=True)
class Sample:
    """A step traced with one micro-batch: sizes in bytes."""

    micro_batch: int
    sizes: tuple[int, ...]
    categories: tuple[str, ...]
    modules: tuple[str, ...]
    streams: tuple[str, ...]
    events: tuple[int, ...]
    phases: tuple[tuple[str, int], ...]
    work: Work4


def alone(sample: Sample) -> Trace:
    """One micro-batch without a law: the figures hold for it only."""
    storages = zip(sample.sizes, sample.categories, sample.modules, sample.streams, strict=True)
    return Trace(
        tuple(Storage(size, 0, category, module, stream) for size, category, module, stream in storages),
        sample.events,
        sample.phases,
        Work(*(Law(value, 0.0) for value in sample.work)),
    )


def combine(small: Sample, large: Sample) -> Trace:
    """The law through two micro-batches. Raises NotAffineError when their events are not the same."""
    if small.events != large.events or small.phases != large.phases:
        raise NotAffineError("the step allocates other things with another micro-batch")
    between = large.micro_batch - small.micro_batch
    storages = []
    for one, other, category, module, stream in zip(
        small.sizes, large.sizes, small.categories, small.modules, small.streams, strict=True
    ):
        per_sample, rest = divmod(other - one, between)
        if rest:
            raise NotAffineError(f"{one} bytes in {module or 'the step'} become {other}: no whole bytes each")
        fixed = one - per_sample * small.micro_batch
        storages.append(Storage(fixed, per_sample, category, module, stream))
    laws = []
    for a, b in zip(small.work, large.work, strict=True):
        slope = (b - a) / between
        laws.append(Law(a - slope * small.micro_batch, slope))
    return Trace(tuple(storages), small.events, small.phases, Work(*laws))

"""The allocations of one rank in a training step, in order, as plain values without torch.

Sizes are affine in the micro-batch: a fixed part plus a part per sample.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

GATHERED, GRADIENTS, ACTIVATIONS = "gathered parameters", "gradients", "activations"
TEMPORARIES, COMMUNICATION, BATCH = "temporaries", "communication", "batch"
COMPLETE = "complete"
"""Category of a storage of 0 bytes, which is allocated and freed when the gradient of the parameter `module`
is complete."""
PRODUCT = "matrix product"
"""Category of a storage of 0 bytes, which is allocated and freed after the first matrix product of a phase:
cuBLAS takes its workspace there."""
LATER = "backward weights"
"Name of the phase that computes the weight gradients that the backward pass has postponed."
COMPUTE, ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "compute", "all-gather", "reduce-scatter", "all-reduce"
"""CUDA streams. FSDP2 allocates each all-gather's output on a separate stream, and each sharded gradient on
another one (FSDPCommContext in torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py)."""


class NotAffineError(ValueError):
    """The allocations of a step are not an affine function of the micro-batch."""


class Affine(NamedTuple):
    """A quantity that grows linearly with the micro-batch: `fixed + per_sample x micro-batch`."""

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
    "The module that allocated it: the model's class for the root, `loss` outside of the model."
    stream: str = COMPUTE
    "The CUDA stream that was current. PyTorch's allocator reuses its memory only on this stream."

    def at(self, micro_batch: int) -> int:
        return self.fixed + self.per_sample * micro_batch


class Work(NamedTuple):
    """FLOPs, memory traffic and exchanged bytes of one micro-batch on one rank: forward, then backward."""

    forward_flops: Affine
    backward_flops: Affine
    "Includes recomputation, and gradients that are computed after the backward pass."
    forward_bytes: Affine
    "Memory traffic: the bytes that all kernels read and write."
    backward_bytes: Affine
    forward_exchanged: Affine = Affine(0.0, 0.0)
    """Bytes that a tensor-parallel group gathers and scatters, each tensor whole. An all-reduce counts twice:
    it is both."""
    backward_exchanged: Affine = Affine(0.0, 0.0)
    forward_sent: Affine = Affine(0.0, 0.0)
    "Bytes that a stage of a pipeline sends to the next one, or in the backward pass to the previous one."
    backward_sent: Affine = Affine(0.0, 0.0)
    later_flops: Affine = Affine(0.0, 0.0)
    "Part of `backward_flops`: weight gradients after the backward pass, with `schedule: zero-bubble`."
    later_bytes: Affine = Affine(0.0, 0.0)
    "Part of `backward_bytes`, likewise."


class Moment(NamedTuple):
    """Live bytes after one event."""

    fixed: int
    per_sample: int
    event: int

    def at(self, micro_batch: int) -> int:
        return self.fixed + self.per_sample * micro_batch


@dataclass(frozen=True)
class Trace:
    """A traced forward and backward pass.

    Each gradient is freed as soon as it is complete. launcher.memory.recipe_trace changes that for recipes
    that keep gradients, use them at once, or copy them to the host.

    A complete trace also has an evaluation. If the recipe accumulates, it has a second forward and backward
    pass, in which gradients are temporaries: they are added to the gradients of the first pass. Sharded
    parameters, buffers and optimizer states are not included.
    """

    storages: tuple[Storage, ...]
    events: tuple[int, ...]
    "i >= 0: storage i is allocated. ~i: storage i is freed."
    phases: tuple[tuple[str, int], ...]
    """(name, first event): forward, backward, forward again, backward again, evaluation; and LATER after each
    backward that postpones weight gradients."""
    work: Work

    @property
    def last_backward(self) -> str:
        """Name of the step's last backward phase."""
        return [name for name, _ in self.phases if name.startswith("backward")][-1]

    @cached_property
    def complete(self) -> frozenset[str]:
        """Names of the parameters that get a gradient."""
        return frozenset(storage.module for storage in self.storages if storage.category == COMPLETE)

    def spans(self) -> Iterator[tuple[str, int, int]]:
        """Yield (phase, first event, event after the last one)."""
        ends = [start for _, start in self.phases[1:]] + [len(self.events)]
        for (name, start), end in zip(self.phases, ends, strict=True):
            yield name, start, end

    def highest(self, counted: Sequence[Storage | None] | None = None) -> dict[str, tuple[Moment, ...]]:
        """Return for each phase the moments that can be its peak, each for some micro-batch.

        Sizes are as requested, without the allocator's rounding. `counted`: the storages that count, with
        None in place of the others; by default all count.
        """
        if counted is None:
            counted = self.storages
        moments: dict[str, tuple[Moment, ...]] = {}
        fixed = per_sample = 0
        for name, start, end in self.spans():
            best: dict[int, tuple[int, int]] = {}
            top: int | None = None  # the last allocation of bytes, if nothing has been freed since
            for event, number in enumerate(self.events[start:end], start):
                storage = counted[number if number >= 0 else ~number]
                if storage is None:
                    continue
                if number >= 0:
                    fixed += storage[0]
                    per_sample += storage[1]
                    if storage[0] or storage[1]:
                        top = event
                    continue
                if top is not None:
                    _keep_larger(best, per_sample, fixed, top)
                    top = None
                fixed -= storage[0]
                per_sample -= storage[1]
            if top is not None:
                _keep_larger(best, per_sample, fixed, top)
            moments[name] = _pareto_front(Moment(most, each, at) for each, (most, at) in best.items())
        return moments

    def live_at(self, event: int) -> list[int]:
        """Return the numbers of the storages that are live after this event."""
        phase = bisect.bisect_right(self._live_before, event + 1, key=lambda pair: pair[0]) - 1
        start, before = self._live_before[phase]
        alive = before.copy()
        _follow(self.events[start : event + 1], alive)
        return list(alive)

    @cached_property
    def _live_before(self) -> list[tuple[int, dict[int, None]]]:
        """For each phase, and for the end: (first event, numbers of the storages that are live before it, in
        order of allocation)."""
        before, alive = [], dict[int, None]()
        for _, start, end in self.spans():
            before.append((start, alive.copy()))
            _follow(self.events[start:end], alive)
        return [*before, (len(self.events), alive)]


def _keep_larger(best: dict[int, tuple[int, int]], per_sample: int, fixed: int, event: int) -> None:
    before = best.get(per_sample)
    if before is None or fixed > before[0]:
        best[per_sample] = fixed, event


def _follow(events: Iterable[int], alive: dict[int, None]) -> None:
    for number in events:
        if number >= 0:
            alive[number] = None
        else:
            del alive[~number]


def _pareto_front(moments: Iterable[Moment]) -> tuple[Moment, ...]:
    """Drop each moment that another one reaches or exceeds in both fixed and per-sample bytes."""
    kept: list[Moment] = []
    for moment in sorted(moments, key=lambda moment: (-moment.per_sample, -moment.fixed)):
        if not kept or moment.fixed > kept[-1].fixed:
            kept.append(moment)
    return tuple(kept)


def combine(small: Trace, large: Trace, micro_batch: int) -> Trace:
    """Fit the affine model through two traces: with `micro_batch` samples, and with one more.

    Raises NotAffineError if they differ in more than sizes.
    """
    if small.events != large.events or small.phases != large.phases:
        raise NotAffineError("the order of allocations changes with the micro-batch")
    storages = []
    for storage, larger in zip(small.storages, large.storages, strict=True):
        slope = larger.fixed - storage.fixed
        storages.append(Storage(storage.fixed - slope * micro_batch, slope, *storage[2:]))
    work = []
    for figure, larger_figure in zip(small.work, large.work, strict=True):
        growth = larger_figure.fixed - figure.fixed
        work.append(Affine(figure.fixed - growth * micro_batch, growth))
    return Trace(tuple(storages), small.events, small.phases, Work(*work))

"""A task's own metrics of a step: sums over micro-batches, added up over the ranks together with the loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor

Number = torch.Tensor | float
Sums = tuple[Number, Number]
"A sum over samples, and the sum of their weights."
NOTHING: Sums = (0.0, 0.0)
RESERVED = frozenset(
    (
        *("time", "attempt", "step", "loss", "lr", "grad_norm", "weight", "samples", "seconds"),
        *("seconds_lost", "samples_per_second", "tokens_per_second", "mfu"),
    )
)
"Names in a line of metrics that launcher writes itself. Memory readings begin with MEMORY."
MEMORY = "memory_"


class Logged:
    """Sums and weights by name. Every rank has all names, even those it has not logged."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.counts: bool
        "Whether what is logged is added. A rank without samples left repeats one in an evaluation."
        self.clear()

    def clear(self) -> None:
        """Reset all sums, before the first or a repeated pass of a step."""
        self.counts = True
        self._sums: dict[str, Sums] = dict.fromkeys(self.names, NOTHING)

    def add(self, name: str, total: Number, weight: Number) -> None:
        """Add to the sums of `name`, if the batch counts. Raises KeyError for a name that is not declared."""
        before = self._sums[name]
        if self.counts:
            self._sums[name] = added(before, (total, weight))

    def values(self) -> list[Number]:
        """Return sum and weight of each name, in order, for the reduction over the ranks."""
        return [value for name in self.names for value in self._sums[name]]

    def means(self, sums: Sequence[float]) -> dict[str, float]:
        """Return the mean of each name with a weight, from `values()` added up over all ranks."""
        pairs = zip(self.names, sums[::2], sums[1::2], strict=True)
        return {name: total / weight for name, total, weight in pairs if weight}


def added(sums: Sums, more: Sums) -> Sums:
    """Return `sums` plus the sums of another micro-batch."""
    return sums[0] + _exact(more[0]), sums[1] + _exact(more[1])


def _exact(value: Number) -> Number:
    """Return the value without its graph and in fp64: a sum of small numbers in bf16 stops at 256 of them.
    A value on the GPU stays there: to read it would wait for the pass. A DTensor is read, which refuses a
    part."""
    if isinstance(value, torch.Tensor) and value.device.type != "cpu" and not isinstance(value, DTensor):
        return value.detach().reshape(()).double()
    return float(value.detach() if isinstance(value, torch.Tensor) else value)


_open: list[Logged] = []
"The metrics of this process. They are not kept in the task, whose state is restored when a step is repeated."


def open_logged(names: Sequence[str]) -> Logged:
    """Create and return the metrics of this process."""
    _open[:] = [Logged(names)]
    return _open[0]


def log(name: str, total: Number, weight: Number) -> None:
    """Add to a metric; ignored while a plan traces a step. Raises KeyError for an undeclared name."""
    if _open:
        _open[0].add(name, total, weight)


@contextmanager
def not_again() -> Iterator[None]:
    """Ignore what a recomputation logs: its forward pass has logged it."""
    before = [logged.counts for logged in _open]
    for logged in _open:
        logged.counts = False
    try:
        yield
    finally:
        for logged, counts in zip(_open, before, strict=True):
            logged.counts = counts

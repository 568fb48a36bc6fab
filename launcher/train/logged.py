"""A task's own metrics of a step: sums over its micro-batches, added up over the ranks with the loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Number = torch.Tensor | float


class Logged:
    """Sums and weights by name. Every rank has the same names, whatever it has logged."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.clear()

    def clear(self) -> None:
        """A pass begins, perhaps again."""
        self._sums: dict[str, tuple[Number, Number]] = dict.fromkeys(self.names, (0.0, 0.0))

    def add(self, name: str, total: Number, weight: Number) -> None:
        """Raises KeyError for a name that is not declared."""
        before, weights = self._sums[name]
        self._sums[name] = before + _detached(total), weights + _detached(weight)

    def values(self) -> list[Number]:
        """Sum and weight of each name, in order: what the ranks add up."""
        return [value for name in self.names for value in self._sums[name]]

    def means(self, sums: Sequence[float]) -> dict[str, float]:
        """`values()` of all ranks, added up -> the mean of each name that anything was logged for."""
        pairs = zip(self.names, sums[::2], sums[1::2], strict=True)
        return {name: total / weight for name, total, weight in pairs if weight}


def _detached(value: Number) -> Number:
    return value.detach().reshape(()) if isinstance(value, torch.Tensor) else value


_open: list[Logged] = []
"Of the training of this process. Not the task's own: what a task holds is put back when a step is repeated."


def open_logged(names: Sequence[str]) -> Logged:
    """For the training that begins."""
    _open[:] = [Logged(names)]
    return _open[0]


def log(name: str, total: Number, weight: Number) -> None:
    """Where nothing trains (a plan traces a step) nothing is kept. Raises KeyError for an undeclared name."""
    if _open:
        _open[0].add(name, total, weight)

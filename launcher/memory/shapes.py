"""The shapes of a model: all that the arithmetic of its states needs, as plain values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Parameter:
    """One parameter. Tied weights are one, under the first of their names."""

    name: str
    shape: tuple[int, ...]
    "Of the whole parameter, whatever the sharding."
    itemsize: int
    "Bytes of an element, as the recipe's precision stores it."
    requires_grad: bool = True
    embedding: bool = False
    "8-bit optimizers keep its states in 32 bit."

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    @property
    def vector(self) -> bool:
        """A gain, bias or norm: fewer than two dimensions."""
        return len(self.shape) < 2


@dataclass(frozen=True)
class ModelShapes:
    parameters: tuple[Parameter, ...]
    buffers: int
    "Bytes of all buffers; every rank holds them whole."

    @cached_property
    def distinct(self) -> tuple[tuple[Parameter, int], ...]:
        """(one of those that differ in nothing but their name, how many): blocks repeat a few shapes."""
        alike: dict[tuple[object, ...], tuple[Parameter, int]] = {}
        for p in self.parameters:
            key = (p.shape, p.itemsize, p.requires_grad, p.embedding)
            first, count = alike.get(key, (p, 0))
            alike[key] = first, count + 1
        return tuple(alike.values())

    @cached_property
    def numel(self) -> int:
        return sum(p.numel * count for p, count in self.distinct)

    @property
    def trained(self) -> tuple[Parameter, ...]:
        return tuple(p for p in self.parameters if p.requires_grad)

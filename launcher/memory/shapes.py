"""The shapes of a model: all that the arithmetic of its states needs, as plain values."""

from __future__ import annotations

import math
from dataclasses import dataclass


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

    @property
    def numel(self) -> int:
        return sum(p.numel for p in self.parameters)

    @property
    def trained(self) -> tuple[Parameter, ...]:
        return tuple(p for p in self.parameters if p.requires_grad)

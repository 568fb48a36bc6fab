"""The shapes of a model, from which its states are computed. Plain values."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property


@dataclass(frozen=True)
class Parameter:
    """One parameter. Tied weights are one parameter, under the first of their names."""

    name: str
    shape: tuple[int, ...]
    "Shape before sharding, of the first rank's part if tensor parallelism splits it."
    itemsize: int
    "Bytes per element in the recipe's precision."
    requires_grad: bool = True
    has_gradient: bool = True
    "False if the parameter is trained, but the loss gives it no gradient."

    embedding: bool = False
    "Embedding weights, whose states 8-bit optimizers keep in 32 bit."

    packs: int | None = None
    "Elements of the weight that this parameter stores in 4 bits."

    splits: bool = True
    "False if `zero1` cannot split its rows, which are not contiguous in memory."

    whole: int | None = None
    "Elements of the whole parameter if tensor parallelism splits it."

    @property
    def updated(self) -> bool:
        """Whether the optimizer updates the parameter."""
        return self.requires_grad and self.has_gradient

    @property
    def whole_numel(self) -> int:
        return self.numel if self.whole is None else self.whole

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @cached_property
    def row(self) -> int:
        """Elements per row."""
        return math.prod(self.shape[1:])

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    @property
    def vector(self) -> bool:
        """True for fewer than two dimensions: a gain, bias or norm."""
        return len(self.shape) < 2


@dataclass(frozen=True)
class ModelShapes:
    parameters: tuple[Parameter, ...]
    buffers: int
    "Bytes of all buffers; they are not sharded."
    outer_units: tuple[str, ...] = ()
    "Names of the modules outside of the blocks that FSDP shards as units of their own."
    blocks: tuple[str, ...] = ()
    "Names of the blocks, which are the units of recomputation. Blocks inside of other blocks are left out."

    @cached_property
    def in_block(self) -> Callable[[str], bool]:
        """A function that returns whether the module of a name is a block or inside of one."""
        blocks = frozenset(self.blocks)

        @functools.cache
        def is_in_block(module: str) -> bool:
            return bool(module) and (module in blocks or is_in_block(module.rpartition(".")[0]))

        return is_in_block

    @cached_property
    def distinct(self) -> tuple[tuple[Parameter, int], ...]:
        """Pairs of (parameter, count), where `count` parameters differ only in their names.

        There are few pairs, because blocks repeat a few shapes.
        """
        groups: dict[Parameter, tuple[Parameter, int]] = {}
        for p in self.parameters:
            key = replace(p, name="")
            first, count = groups.get(key, (p, 0))
            groups[key] = first, count + 1
        return tuple(groups.values())

    @cached_property
    def numel(self) -> int:
        """Number of the model's parameters, whatever they are stored in."""
        return sum((p.packs or p.whole_numel) * count for p, count in self.distinct)

    @cached_property
    def gradients(self) -> int:
        """Bytes of all gradients, whole."""
        return sum(p.nbytes * count for p, count in self.distinct if p.updated)

    @cached_property
    def buckets(self) -> int:
        """Bytes of DDP's buckets, which have room for a gradient of each trained parameter."""
        return sum(p.nbytes * count for p, count in self.distinct if p.requires_grad)

    def without_gradients(self, names: Collection[str]) -> ModelShapes:
        """Return the shapes of the model if the loss gives these trained parameters no gradient."""
        if not names:
            return self
        parameters = (replace(p, has_gradient=p.name not in names) for p in self.parameters)
        return replace(self, parameters=tuple(parameters))

    @property
    def trained(self) -> tuple[Parameter, ...]:
        return tuple(p for p in self.parameters if p.requires_grad)

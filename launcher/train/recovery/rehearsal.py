"""A step of the optimizer for the memory that it takes: nothing that exists is written."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from launcher.spec.recipe import Recipe
from launcher.train.optimizers.local_shards import EightBit
from launcher.train.optimizers.state import beside, local


class Rehearsal:
    """States that the optimizer does not have yet are made here, and live as long as this object."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # A shallow copy: what it adds to its dictionaries, the optimizer does not have.
        twin: Any = object.__new__(type(optimizer))
        for name, value in vars(optimizer).items():
            setattr(twin, name, value.copy() if isinstance(value, dict) else value)
        if isinstance(optimizer, EightBit) and optimizer.paged:
            twin._codes = _nothing
        self._twin: torch.optim.Optimizer = twin
        self.parameters: list[torch.Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        self._storages = {_storage(tensor) for tensor in (*map(local, self.parameters), *_states(optimizer))}

    @property
    def made(self) -> int:
        """Bytes of the states that it made."""
        storages = {_storage(state): state.nbytes for state in _states(self._twin)}
        return sum(size for storage, size in storages.items() if storage not in self._storages)

    def step(self) -> None:
        """Parameters without a gradient take part as if they had one; they take no memory for it."""
        without = [p for p in self.parameters if p.grad is None]
        for p in without:
            p.grad = p.detach()
        try:
            with _Unwritten(self._storages):
                self._twin.step()
        finally:
            for p in without:
                p.grad = None


def rehearsal_of(optimizer: torch.optim.Optimizer, recipe: Recipe) -> Rehearsal | None:
    """None where the optimizer's states are in host memory: its step needs nothing on the device."""
    return Rehearsal(optimizer) if recipe.offload == "none" else None


class _Unwritten(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Leaves out every operator that writes one of the storages; the others find their old content."""

    def __init__(self, storages: Iterable[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages = frozenset(storages)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operators on the local shard come here again
        written = _written(func, args, kwargs or {})
        if any(_storage(tensor) in self._storages for tensor in written):
            return written[0] if func._schema.returns else None
        return func(*args, **(kwargs or {}))


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    if not func._schema.is_mutable:
        return []
    values = [
        kwargs.get(argument.name) if place >= len(args) else args[place]
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _states(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    values = (value for state in optimizer.state.values() for value in state.values())
    return [local(value) for value in values if isinstance(value, torch.Tensor)]


def _nothing(p: torch.Tensor) -> torch.Tensor:
    """For paged codes, which make room on the device when others need it; bitsandbytes never frees them."""
    return beside(p, torch.empty(0, dtype=torch.uint8, device=local(p).device), p.shape)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)

"""An optimizer step that allocates the usual memory but changes no parameter and no existing state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from launcher.spec.recipe import Recipe
from launcher.train.activations.selective import written
from launcher.train.local_shards import local, sharded_like
from launcher.train.optimizers.eight_bit import EightBit
from launcher.train.optimizers.sharded_states import ShardedStates
from launcher.train.optimizers.state import step_alone


class OptimizerDryRun:
    """Dry run of an optimizer. States that do not exist yet are created and live as long as this object."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # The dictionaries are copied, so states added to the twin are not added to the optimizer.
        twin: Any = object.__new__(type(optimizer))
        for name, value in vars(optimizer).items():
            setattr(twin, name, value.copy() if isinstance(value, dict) else value)
        if isinstance(optimizer, EightBit) and optimizer.paged:
            twin._codes = _no_codes
        self._twin: torch.optim.Optimizer = twin
        self.parameters: list[torch.Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        self._storages = {_storage(tensor) for tensor in (*map(local, self.parameters), *_states(optimizer))}

    @property
    def new_state_bytes(self) -> int:
        """Bytes of the states that the dry run created."""
        storages = {_storage(state): state.nbytes for state in _states(self._twin)}
        return sum(size for storage, size in storages.items() if storage not in self._storages)

    def step_alone(self, group: dict[str, Any], p: torch.Tensor) -> None:
        """Run the step of one parameter, which has a gradient."""
        with _SkipWrites(self._storages):
            step_alone(self._twin, group, p)

    def step(self) -> None:
        """Run a step. Parameters without a gradient get one that takes no memory."""
        without = [p for p in self.parameters if p.grad is None]
        for p in without:
            p.grad = p.detach()
        try:
            with _SkipWrites(self._storages):
                self._twin.step()
        finally:
            for p in without:
                p.grad = None


def dry_run_of(optimizer: torch.optim.Optimizer, recipe: Recipe) -> OptimizerDryRun | None:
    """Return a dry run, or None if the states are in host memory: the step then needs no GPU memory."""
    if recipe.offload != "none":
        return None
    # The rows of other ranks need no update here, and gathering them would be a collective.
    return OptimizerDryRun(optimizer.inner if isinstance(optimizer, ShardedStates) else optimizer)


class _SkipWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Skips every operator that would write to one of the storages; other operators run."""

    def __init__(self, storages: Iterable[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages = frozenset(storages)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then calls its operators on the local shard, which come here
        changed = list(written(func, args, kwargs or {}))
        if any(_storage(tensor) in self._storages for tensor in changed):
            return changed[0] if func._schema.returns else None
        return func(*args, **(kwargs or {}))


def _states(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    values = (value for state in optimizer.state.values() for value in state.values())
    return [local(value) for value in values if isinstance(value, torch.Tensor)]


def _no_codes(p: torch.Tensor) -> torch.Tensor:
    """Return empty codes instead of paged ones, which leave the GPU when memory is needed and which
    bitsandbytes never frees."""
    return sharded_like(p, torch.empty(0, dtype=torch.uint8, device=local(p).device), p.shape)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)

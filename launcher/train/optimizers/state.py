"""Optimizer states that are sharded like their parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from launcher.train.local_shards import column_cuts, local, sharded_like
from launcher.train.optimizers.proxy_optimizer import ProxyOptimizer

IN_CHECKPOINT = "optimizer.state."
"Beginning of the names of states in a checkpoint; the parameter's name follows."


def rows_sharded_like(p: torch.Tensor, row: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros of shape `(p.shape[0], *row)`, sharded by rows like `p`. Ranks with parts of the same rows
    of `p` have copies."""
    shard = local(p)
    part = torch.zeros((shard.shape[0], *row), dtype=dtype, device=shard.device)
    if not isinstance(p, DTensor):
        return part
    cuts = column_cuts(p)
    placements = [Replicate() if at in cuts else placement for at, placement in enumerate(p.placements)]
    return sharded_like(p, part, (p.shape[0], *row), placements)


def zeros_sharded_like(p: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return contiguous zeros with the shape and sharding of `p`."""
    shard = local(p)
    return sharded_like(p, torch.zeros(shard.shape, dtype=dtype, device=shard.device), p.shape)


def settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the settings of each parameter group: weight decay, betas and so on."""
    return [
        {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
    ]


def restore_settings(optimizer: torch.optim.Optimizer, kept: Sequence[dict[str, Any]]) -> None:
    """Restore the job's settings, `kept` from before a checkpoint with its own settings was loaded."""
    for group, group_settings in zip(optimizer.param_groups, kept, strict=True):
        group.update(group_settings)


def step_alone(optimizer: torch.optim.Optimizer, group: dict[str, Any], p: torch.Tensor) -> None:
    """Update one parameter only, with the settings of `group`."""
    groups = optimizer.param_groups
    optimizer.param_groups = [{**group, "params": [p]}]
    try:
        optimizer.step()
    finally:
        optimizer.param_groups = groups


def step_mesh_by_mesh(optimizer: torch.optim.Optimizer) -> None:
    """Make `step` update the parameters of one mesh after the other: torch's kernels take only one at a time.

    With tensor parallelism some parameters are cut, others are only sharded or whole. With `zero1`, a
    parameter whose rows are not contiguous is whole.
    """
    step, lists = optimizer.step, optimizer.param_groups
    meshes = list(dict.fromkeys(_mesh_of(p) for group in lists for p in group["params"]))
    if len(meshes) < 2:
        return

    def by_mesh(closure: Any = None) -> None:
        groups = optimizer.param_groups
        try:
            for mesh in meshes:
                optimizer.param_groups = [
                    {**group, "params": [p for p in group["params"] if _mesh_of(p) == mesh]}
                    for group in groups
                ]
                step()
        finally:
            optimizer.param_groups = groups

    optimizer.step = by_mesh  # type: ignore[method-assign, assignment]


def _mesh_of(p: torch.Tensor) -> DeviceMesh | None:
    return p.device_mesh if isinstance(p, DTensor) else None


@torch.no_grad()
def make_states(optimizer: torch.optim.Optimizer) -> None:
    """Create the states that do not exist yet, one parameter at a time, so that one gradient of zeros is in
    memory at once. The step changes nothing and is not counted."""
    if isinstance(optimizer, ProxyOptimizer):
        optimizer.update_inner()
        make_states(optimizer.inner)
        optimizer.expose_inner()
        return
    for group in optimizer.param_groups:
        for p in group["params"]:
            if not optimizer.state.get(p):
                p.grad = torch.zeros_like(p)
                step_alone(optimizer, {**group, "lr": 0.0}, p)
                p.grad = None
                if "step" in optimizer.state[p]:
                    optimizer.state[p]["step"].zero_()


class OwnOptimizer(torch.optim.Optimizer):
    """An optimizer that torch does not have. A subclass creates the states of a parameter and updates it.

    Each state is loaded in its saved dtype. torch's own `load_state_dict` casts every state to the dtype of
    its parameter, which turns 8-bit codes into floats and bf16 states into fp32.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters with a gradient. `closure` is ignored; torch.distributed.checkpoint passes
        None by name."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        self._begin(p, state)
                    if "step" in state:
                        state["step"] += 1
                    self._update(p, state, group)

    def _begin(self, p: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
        """Put the states of `p` into `state`. A state `step` is increased before each update."""
        raise NotImplementedError

    def _update(self, p: torch.Tensor, state: dict[str, torch.Tensor], group: dict[str, Any]) -> None:
        """Update this rank's shard of `p`, which has a gradient, and its states."""
        raise NotImplementedError

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states and settings, matching parameters by their order like torch. Raises ValueError."""
        saved_groups, states = state_dict["param_groups"], state_dict["state"]
        sizes, saved_sizes = (
            [len(group["params"]) for group in groups] for groups in (self.param_groups, saved_groups)
        )
        if sizes != saved_sizes:
            raise ValueError(f"saved groups have {saved_sizes} parameters; the optimizer's have {sizes}")
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            for p, name in zip(group["params"], saved["params"], strict=True):
                self.state.pop(p, None)
                if name in states:
                    self.state[p] = dict(states[name])
            group.update({key: value for key, value in saved.items() if key != "params"})

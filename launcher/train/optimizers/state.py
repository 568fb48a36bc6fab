"""Optimizer states that are sharded like their parameter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from launcher.train.checkpoints.reader import read_metadata
from launcher.train.optimizers.proxies import ProxyOptimizer


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of `tensor`, or `tensor` itself. It shares memory; use `torch.no_grad()`.

    Call this before each use: FSDP2 may replace a parameter's storage.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_like(p: torch.Tensor, part: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return `part` as this rank's shard of a tensor of `shape` that is sharded like `p`.

    The state of a sharded parameter must be a DTensor: torch.distributed.checkpoint treats a plain tensor as
    a replica and silently saves it from one rank only.
    """
    if not isinstance(p, DTensor):
        return part
    stride = torch.empty(tuple(shape), device="meta").stride()
    whole = TensorMeta(torch.Size(shape), stride, part.dtype)
    # FSDP2 creates its shards like this. DTensor.from_local would move a part on the host to the GPU.
    return DTensor(part, DTensorSpec(p.device_mesh, p.placements, whole), requires_grad=False)  # type: ignore[no-untyped-call]


def rows_sharded_like(p: torch.Tensor, row: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros of shape `(p.shape[0], *row)`, sharded by rows like `p`."""
    mine = local(p)
    part = torch.zeros((mine.shape[0], *row), dtype=dtype, device=mine.device)
    return sharded_like(p, part, (p.shape[0], *row))


def zeros_sharded_like(p: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return contiguous zeros with the shape and sharding of `p`."""
    mine = local(p)
    return sharded_like(p, torch.zeros(mine.shape, dtype=dtype, device=mine.device), p.shape)


def without_states(states: Iterable[str], checkpoint: Path, prefix: str) -> list[str]:
    """Return the names in `states` without a state in `checkpoint`: those parameters never had a gradient.

    `prefix` is the path of the states in the checkpoint, such as "optimizer.state".
    """
    keys = read_metadata(checkpoint).state_dict_metadata
    saved = {key.removeprefix(f"{prefix}.").rpartition(".")[0] for key in keys if key.startswith(prefix)}
    return [name for name in states if name not in saved]


def settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the settings of each parameter group: weight decay, betas and so on."""
    return [
        {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
    ]


def put_back(optimizer: torch.optim.Optimizer, kept: Sequence[dict[str, Any]]) -> None:
    """Restore the job's settings, `kept` from before loading a checkpoint, which has its own."""
    for group, its in zip(optimizer.param_groups, kept, strict=True):
        group.update(its)


def step_alone(optimizer: torch.optim.Optimizer, group: dict[str, Any], p: torch.Tensor) -> None:
    """Update one parameter only, with the settings of `group`."""
    groups = optimizer.param_groups
    optimizer.param_groups = [{**group, "params": [p]}]
    try:
        optimizer.step()
    finally:
        optimizer.param_groups = groups


@torch.no_grad()
def make_states(optimizer: torch.optim.Optimizer) -> None:
    """Create the states that do not exist yet, one parameter at a time, so that one gradient of zeros is in
    memory at once. The step changes nothing and is not counted."""
    if isinstance(optimizer, ProxyOptimizer):
        optimizer.lead_inner()
        make_states(optimizer.inner)
        optimizer.follow_inner()
        return
    for group in optimizer.param_groups:
        for p in group["params"]:
            if not optimizer.state.get(p):
                p.grad = torch.zeros_like(p)
                step_alone(optimizer, {**group, "lr": 0.0}, p)
                p.grad = None
                if "step" in optimizer.state[p]:
                    optimizer.state[p]["step"].zero_()


class KeepsDtypes(torch.optim.Optimizer):
    """An optimizer that loads each state in its saved dtype.

    torch's own `load_state_dict` casts every state to the dtype of its parameter, which turns 8-bit codes
    into floats and bf16 states into fp32.
    """

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

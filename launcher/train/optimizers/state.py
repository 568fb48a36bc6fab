"""Optimizer state beside a parameter: made on the local shard, saved as a piece of the whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from launcher.train.checkpoints.reader import read_metadata


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it: memory shared with it, under `torch.no_grad()`.

    Ask before each use: FSDP2 may give a parameter another storage.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_like(p: torch.Tensor, part: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """`part` as this rank's piece of a tensor of `shape`, cut and spread over the ranks as `p` is.

    torch.distributed.checkpoint takes a plain tensor for a replica and keeps that of one rank only: the
    state of a sharded parameter has to be a DTensor, or all but one rank's is lost without a word.
    """
    if not isinstance(p, DTensor):
        return part
    stride = torch.empty(tuple(shape), device="meta").stride()
    whole = TensorMeta(torch.Size(shape), stride, part.dtype)
    # As FSDP2 makes its shards. DTensor.from_local would move a part that is kept on the host to the GPU.
    return DTensor(part, DTensorSpec(p.device_mesh, p.placements, whole), requires_grad=False)  # type: ignore[no-untyped-call]


def rows_sharded_like(p: torch.Tensor, row: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros of shape `(p.shape[0], *row)`, each row on the rank that has the row of `p`."""
    mine = local(p)
    part = torch.zeros((mine.shape[0], *row), dtype=dtype, device=mine.device)
    return sharded_like(p, part, (p.shape[0], *row))


def zeros_sharded_like(p: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Zeros of the shape of `p`, contiguous whatever `p` is."""
    mine = local(p)
    return sharded_like(p, torch.zeros(mine.shape, dtype=dtype, device=mine.device), p.shape)


def without_states(states: Iterable[str], checkpoint: Path, prefix: str) -> list[str]:
    """Of the parameters named in `states` those that `checkpoint` has no state of: they had no gradient yet.

    `prefix` is the path of the states in it, such as "optimizer.state".
    """
    keys = read_metadata(checkpoint).state_dict_metadata
    saved = {key.removeprefix(f"{prefix}.").rpartition(".")[0] for key in keys if key.startswith(prefix)}
    return [name for name in states if name not in saved]


def settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Of each group of parameters: weight decay, betas and whatever else the optimizer was built with."""
    return [
        {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
    ]


def put_back(optimizer: torch.optim.Optimizer, kept: Sequence[dict[str, Any]]) -> None:
    """Loading a checkpoint brings its own settings: those of the job, `kept` from before, are in force."""
    for group, its in zip(optimizer.param_groups, kept, strict=True):
        group.update(its)


class KeepsDtypes(torch.optim.Optimizer):
    """Loads each state in the type it was saved in.

    torch's own `load_state_dict` casts every state to the type of its parameter, which turns 8-bit codes
    into floats and bf16 states into fp32.
    """

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Parameters are matched by their order in the groups, as torch does. Raises ValueError."""
        saved_groups, states = state_dict["param_groups"], state_dict["state"]
        sizes, saved_sizes = (
            [len(group["params"]) for group in groups] for groups in (self.param_groups, saved_groups)
        )
        if sizes != saved_sizes:
            raise ValueError(f"groups of {saved_sizes} parameters were saved; the optimizer has {sizes}")
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            for p, name in zip(group["params"], saved["params"], strict=True):
                self.state.pop(p, None)
                if name in states:
                    self.state[p] = dict(states[name])
            group.update({key: value for key, value in saved.items() if key != "params"})

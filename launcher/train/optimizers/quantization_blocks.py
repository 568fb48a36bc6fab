"""The scales of 8-bit states: one fp32 number per block of 256 elements of a rank's shard.

If a shard's row consists of whole blocks, each scale belongs to one row and is sharded with it: any number of
ranks can read the state. Otherwise blocks cross rows and start at the beginning of the shard: only the same
shards can read them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor, Placement, Shard

from launcher.spec.listed_names import listed
from launcher.spec.optimizer_table import BLOCK
from launcher.train.local_shards import local, sharded_like
from launcher.train.optimizers.state import IN_CHECKPOINT


def scales_sharded_like(p: torch.Tensor) -> torch.Tensor:
    """Return zero scales for the shard of `p`, in the form that a checkpoint saves; `p.ndim` >= 1.

    The shape is `(rows, blocks per row)` if the rows of each shard are whole blocks, else `(shards, blocks of
    the largest shard)`, or with tensor parallelism `(1, shards of each dimension of the mesh, blocks)`: other
    meshes with as many shards must not read them.
    """
    row, cuts = p.numel() // p.shape[0], _cuts(p)
    columns = math.prod(size for size, dim in cuts if dim > 0)
    if row % (BLOCK * columns) == 0:
        part = _zeros(p, local(p).shape[0], row // BLOCK // columns)
        return sharded_like(p, part, (p.shape[0], row // BLOCK))
    rows = p.shape[0]
    for size, dim in reversed(cuts):  # tensor parallelism cuts first, and FSDP what it has left
        row, rows = (math.ceil(row / size), rows) if dim > 0 else (row, math.ceil(rows / size))
    blocks = math.ceil(rows * row / BLOCK)
    if [dim for _, dim in cuts] in ([], [0]):
        shards = cuts[0][0] if cuts else 1
        return sharded_like(p, _zeros(p, 1, blocks), (shards, blocks))
    assert isinstance(p, DTensor)
    shape, placements, at = [1], list[Placement](), 0
    for size, placement in zip(p.device_mesh.shape, p.placements, strict=True):
        if placement.is_replicate():
            placements.append(placement)
            continue
        at += 1
        shape.append(size)
        placements.append(Shard(at))
    part = _zeros(p, *(1,) * len(shape), blocks)
    return sharded_like(p, part, (*shape, blocks), placements)


def _zeros(p: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float32, device=local(p).device)


def scales_in_use(scales: torch.Tensor, elements: int) -> torch.Tensor:
    """Return the scales of a shard with `elements` as a flat view of `scales`, as the kernels need them."""
    return local(scales).view(-1)[: math.ceil(elements / BLOCK)]


def _cuts(p: torch.Tensor) -> list[tuple[int, int]]:
    """Return (number of parts, dimension of the tensor) for each dimension of the mesh that cuts it."""
    if not isinstance(p, DTensor):
        return []
    cuts = zip(p.device_mesh.shape, p.placements, strict=True)
    return [(size, getattr(placement, "dim", 0)) for size, placement in cuts if not placement.is_replicate()]


def other_shards(states: Mapping[str, Mapping[str, Any]], checkpoint: Metadata) -> str | None:
    """Return why `checkpoint` cannot be read into the 8-bit `states`, or None if it can.

    `states` is `{parameter: {name: tensor}}`.
    """
    wanted = {name: state["absmax1"].shape for name, state in states.items() if "absmax1" in state}
    saved: dict[str, torch.Size] = {}
    for name in wanted:
        entry = checkpoint.state_dict_metadata.get(f"{IN_CHECKPOINT}{name}.absmax1")
        if isinstance(entry, TensorStorageMetadata):  # torch itself reports a missing one
            saved[name] = entry.size
    differ = [name for name, shape in saved.items() if shape != wanted[name]]
    if not differ:
        return None
    rows = states[differ[0]]["state1"].shape[0]
    before, now = (_described(shapes[differ[0]], rows) for shapes in (saved, wanted))
    return (
        f"the 8-bit states of {listed(differ, 3)} were "
        f"saved in {before} and cannot be read in {now}: a shard's part of a row is not a multiple of "
        f"{BLOCK} elements, so blocks cross rows. Resume in {before}: fsdp and zero1 have one per rank, "
        "hybrid has one per rank of a node, ddp and none have one"
    )


def _described(shape: torch.Size, rows: int) -> str:
    """Describe the shards of the blocks, from the shape of the scales."""
    if len(shape) == 2:
        return "whole rows" if shape[0] == rows else f"{shape[0]} shards"
    return f"{' x '.join(map(str, shape[1:-1]))} shards"

"""The scales of 8-bit states: one fp32 number per block of 256 elements of a rank's shard.

If a row consists of whole blocks, each scale belongs to one row and is sharded with it: any number of ranks
can read the state. Otherwise blocks cross rows and start at the beginning of the shard: only the same number
of shards can read them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, Replicate, Shard

from launcher.spec.optimizers import BLOCK
from launcher.train.checkpoints.reader import read_metadata
from launcher.train.optimizers.state import local, rows_sharded_like, sharded_like
from launcher.train.rank import SetupError


def scales_sharded_like(p: torch.Tensor) -> torch.Tensor:
    """Return zero scales for the shard of `p`, in the form that a checkpoint saves; `p.ndim` >= 1.

    The shape is `(rows, blocks per row)` if rows are whole blocks, else `(shards, blocks of the largest
    shard)`.

    Raises: SetupError if the parameter is not sharded by rows.
    """
    row, shards = p.numel() // p.shape[0], _shards(p)
    if row % BLOCK == 0:
        return rows_sharded_like(p, (row // BLOCK,), torch.float32)
    largest = math.ceil(p.shape[0] / shards) * row
    part = torch.zeros((1, math.ceil(largest / BLOCK)), device=local(p).device)
    return sharded_like(p, part, (shards, part.shape[1]))


def scales_in_use(scales: torch.Tensor, elements: int) -> torch.Tensor:
    """Return the scales of a shard with `elements` as a flat view of `scales`, as the kernels need them."""
    return local(scales).view(-1)[: math.ceil(elements / BLOCK)]


def _shards(p: torch.Tensor) -> int:
    if not isinstance(p, DTensor):
        return 1
    cut = [dim for dim, placement in enumerate(p.placements) if not isinstance(placement, Replicate)]
    if len(cut) > 1 or any(p.placements[dim] != Shard(0) for dim in cut):
        raise SetupError(f"8-bit states need parameters sharded by rows, not {p.placements}")
    return p.device_mesh.size(cut[0]) if cut else 1


def other_shards(states: Mapping[str, Mapping[str, Any]], checkpoint: Path, prefix: str) -> str | None:
    """Return why `checkpoint` cannot be read into the 8-bit `states`, or None if it can.

    `states` is `{parameter: {name: tensor}}`; `prefix` is its path in the checkpoint, such as
    "optimizer.state".
    """
    wanted = {
        f"{prefix}.{parameter}.absmax1": state["absmax1"].shape
        for parameter, state in states.items()
        if "absmax1" in state
    }
    if not wanted:
        return None
    metadata = read_metadata(checkpoint).state_dict_metadata
    saved = {key: entry.size for key, entry in metadata.items() if isinstance(entry, TensorStorageMetadata)}
    # torch itself reports a missing key, as after a change of the optimizer.
    differ = [key for key, shape in wanted.items() if key in saved and saved[key] != shape]
    if not differ:
        return None
    before, now = saved[differ[0]][0], wanted[differ[0]][0]
    names = [key.removeprefix(f"{prefix}.").removesuffix(".absmax1") for key in differ]
    return (
        f"the 8-bit states of {', '.join(names[:3])}{f' and {len(names) - 3} more' * (len(names) > 3)} were "
        f"saved in {before} shards and cannot be read in {now}: their rows are not multiples of {BLOCK} "
        f"elements, so blocks cross rows. Resume in {before} shards: fsdp and zero1 have one per rank, "
        "hybrid has one per rank of a node, ddp and none have one"
    )

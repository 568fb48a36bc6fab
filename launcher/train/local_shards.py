"""Tensors that this rank holds a part of: FSDP's shards, and tensors that tensor parallelism cuts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

WAIT_APART = hasattr(FSDPParam, "to_accumulated_grad_if_needed")
"""Whether gradients that wait for the last micro-batch are in `unsharded_accumulated_grad`, as up to torch
2.14. Since 2.15 they wait in `.grad` of the gathered parameter, and FSDP2 itself gives them one type."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of `tensor`, or `tensor` itself. It shares memory; use `torch.no_grad()`.

    Call this before each use: FSDP2 may replace a parameter's storage.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def offset_of(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and offset of this rank's part in the whole tensor. A replica is the whole tensor."""
    if not isinstance(tensor, DTensor):
        return tuple(tensor.shape), (0,) * tensor.ndim
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offset)


def parts(tensor: torch.Tensor) -> int:
    """Return the number of parts in which ranks hold the tensor. Further ranks hold copies of a part."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in sizes if not placement.is_replicate())


def slices_of(tensor: torch.Tensor) -> tuple[slice, ...]:
    """Return the slices of the whole tensor that this rank has."""
    shape, offset = offset_of(tensor)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def sharded_like(
    p: torch.Tensor, part: torch.Tensor, shape: Sequence[int], placements: Sequence[Placement] | None = None
) -> torch.Tensor:
    """Return `part` as this rank's shard of a tensor of `shape` on the mesh of `p`, sharded like `p` unless
    `placements` says how.

    The state of a sharded parameter must be a DTensor: torch.distributed.checkpoint treats a plain tensor as
    a replica and silently saves it from one rank only.
    """
    if not isinstance(p, DTensor):
        return part
    stride = torch.empty(tuple(shape), device="meta").stride()
    whole = TensorMeta(torch.Size(shape), stride, part.dtype)
    # FSDP2 creates its shards like this. DTensor.from_local would move a part on the host to the GPU.
    spec = DTensorSpec(p.device_mesh, tuple(placements or p.placements), whole)
    return DTensor(part, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def column_cuts(p: torch.Tensor) -> list[int]:
    """Return the dimensions of the mesh whose ranks have parts of each row of `p`."""
    if not isinstance(p, DTensor):
        return []
    return [at for at, placement in enumerate(p.placements) if getattr(placement, "dim", 0) > 0]


def from_part(
    part: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    """Return the contiguous DTensor of this shape that has `part` on this rank. Gradients pass through it."""
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(part, mesh, placements, shape=torch.Size(shape), stride=stride)


def parameter_groups(unit: FSDPModule) -> list[Any]:
    """Return the parameter groups that FSDP2 gathers at once in this unit; each has `fsdp_params`."""
    return groups_of(unit._get_fsdp_state())


def groups_of(state: Any) -> list[Any]:
    """Return one group if the unit has parameters. Newer versions may have several, for several meshes."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []

"""The norm of the whole gradient over all ranks, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from launcher.train.local_shards import local, parts


def divide_and_clip(
    gradients: list[torch.Tensor],
    factor: float,
    clip_norm: float | None,
    over_stages: Callable[[float], float] | None = None,
) -> float:
    """Multiply all gradients by `factor`, then clip them to `clip_norm`, in one pass over memory.

    Returns the norm of the whole gradient before clipping, over all shards of all ranks: it does not depend
    on the sharding. `over_stages` adds up a number over the stages of a pipeline.
    """
    norm_after = _total_norm(gradients) * factor
    if over_stages is not None:
        norm_after = math.sqrt(over_stages(norm_after**2))
    if clip_norm is not None and norm_after > clip_norm:
        factor *= clip_norm / norm_after
    torch._foreach_mul_([local(gradient) for gradient in gradients], factor)
    return norm_after


@torch.no_grad()
def _total_norm(gradients: Sequence[torch.Tensor]) -> float:
    cuts = {(g.device_mesh, g.placements) if isinstance(g, DTensor) else None for g in gradients}
    if len(cuts) < 2:
        norm = torch.nn.utils.get_total_norm(gradients)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    # Tensor parallelism cuts parameters in several ways. The largest mesh has all ranks of this part of the
    # model, which get the same bits.
    mesh = max((g.device_mesh for g in gradients if isinstance(g, DTensor)), key=DeviceMesh.size)
    # One after the other: fp32 copies of all gradients would be the peak of a step in bf16.
    norms = [norm_of(local(gradient)) for gradient in gradients]
    squared = share_of_square(dict(zip(gradients, norms, strict=True)), mesh.size())
    for group in reversed(mesh.get_all_groups()):
        dist.all_reduce(squared, group=group)
    return math.sqrt(squared)


def norm_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the norm of a tensor, computed in fp32, or in fp64 if the tensor is."""
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    norm: torch.Tensor = torch.linalg.vector_norm(tensor, dtype=dtype)
    return norm


def share_of_square(norms: Mapping[torch.Tensor, torch.Tensor], ranks: int) -> torch.Tensor:
    """Return this rank's share of the squared norm of a gradient, in fp64. The shares of all `ranks` add up
    to the whole. Ranks that hold the same part divide it.

    `norms`: a parameter, or its gradient -> the norm of this rank's part of the gradient. At least one.
    """
    square = torch.stack([*norms.values()]).double().square()
    shares = torch.tensor([parts(tensor) / ranks for tensor in norms], dtype=square.dtype)
    return (square * shares.to(square.device)).sum()

"""`sharding: zero1`: parameters and gradients are whole on every rank, optimizer states are sharded.

torch's ZeroRedundancyOptimizer is not used: it gives whole parameters to ranks, so one large embedding
decides how much a rank holds, and its states must be collected on one rank before
torch.distributed.checkpoint sees them. Here states are sharded by rows like FSDP2's, so any optimizer that
runs under FSDP2 runs here, and the states are saved and resharded in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from launcher.train.local_shards import local, sharded_like
from launcher.train.optimizers.proxy_optimizer import Groups, Make, ProxyOptimizer

_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ShardedStates(ProxyOptimizer):
    """An optimizer that updates this rank's rows of each parameter, then gathers the rows of all ranks.

    A proxy is this rank's rows as a DTensor that shares their memory. Rows are split as in FSDP2, also the
    rows of a tensor-parallel rank's part. Every rank keeps all states of a parameter that cannot be split:
    one without dimensions, or one whose rows are not contiguous in memory.
    """

    def __init__(self, groups: Groups, wide: Collection[torch.Tensor], make: Make, mesh: DeviceMesh) -> None:
        super().__init__(groups, wide, make, lambda p: _rows(p, mesh))
        self._mesh = mesh
        self.expose_inner()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters. `closure` is ignored; torch.distributed.checkpoint passes None by name.

        Every rank must have gradients for the same parameters, as DDP ensures.
        """
        self.update_inner()
        self._follow_data()
        updated = [p for p in self.proxies if p.grad is not None]
        for p in updated:
            proxy = self.proxies[p]
            gradient = local(p.grad)
            if _is_split(p, proxy):
                gradient = gradient[_own_rows(gradient, self._mesh)]
            proxy.grad = sharded_like(proxy, gradient, p.shape)
        try:
            self.inner.step()
        finally:
            for p in updated:
                self.proxies[p].grad = None
        self.expose_inner()
        self._gather(updated)

    def _follow_data(self) -> None:
        """Let the proxies share the memory of parameters whose `.data` code of the task has replaced."""
        for p, proxy in self.proxies.items():
            whole = local(p)
            if whole.untyped_storage().data_ptr() == local(proxy).untyped_storage().data_ptr():
                continue
            if _is_split(p, proxy):
                proxy._local_tensor = whole[_own_rows(whole, self._mesh)]  # type: ignore[attr-defined]
            else:
                proxy.data = p.detach()

    @property
    def gather_bytes(self) -> int:
        """The bytes of the largest buffer that gathering allocates."""
        ranks = self._mesh.size()
        return max(
            (_padded(local(p.detach()), ranks) for p in self.proxies if self._needs_buffer(p)), default=0
        )

    def update_inner(self) -> None:
        super().update_inner()
        for p, proxy in self.proxies.items():
            if p not in self.state:  # dropped by the reader of a checkpoint that has none
                self.inner.state.pop(proxy, None)

    def _gather(self, updated: Sequence[torch.Tensor]) -> None:
        """Fill the parameters with the rows of all ranks: in place if all ranks have equally many rows."""
        group, buffered, started = self._mesh.get_group(), [], []
        for p in updated:
            if self._needs_buffer(p):
                buffered.append(p)
            elif _is_split(p, self.proxies[p]):
                whole, rows = _flat(local(p.detach())), _flat(local(self.proxies[p]))
                started.append(_all_gather(whole, rows, group=group, async_op=True))
        for work in started:
            work.wait()
        for p in buffered:
            self._gather_uneven(local(p.detach()), local(self.proxies[p]))

    def _gather_uneven(self, whole: torch.Tensor, rows: torch.Tensor) -> None:
        ranks = self._mesh.size()
        buffer = torch.empty(_padded(whole, ranks) // whole.itemsize, dtype=whole.dtype, device=whole.device)
        own = buffer.chunk(ranks)[self._mesh.get_local_rank()]
        own[: rows.numel()].copy_(_flat(rows))
        _all_gather(buffer, own, group=self._mesh.get_group())
        _flat(whole).copy_(buffer[: whole.numel()])  # only the last rows are padding

    def _needs_buffer(self, p: torch.Tensor) -> bool:
        return _is_split(p, self.proxies[p]) and local(p.detach()).shape[0] % self._mesh.size() != 0


def _is_split(p: torch.Tensor, proxy: torch.Tensor) -> bool:
    """Return whether the proxy is some rows of this rank's part of the parameter."""
    if not isinstance(proxy, DTensor):
        return False
    return not isinstance(p, DTensor) or proxy.device_mesh != p.device_mesh


def can_split(whole: torch.Tensor) -> bool:
    """Return whether the rows of a tensor follow each other in memory."""
    rows_follow = whole.ndim > 0 and whole.stride(0) * whole.shape[0] == whole.numel()
    return rows_follow and bool(torch.ops.aten.is_non_overlapping_and_dense(whole))


def _rows(p: torch.Tensor, mesh: DeviceMesh) -> nn.Parameter:
    """Return this rank's rows of `p` as a DTensor in its memory, or all of `p` if it cannot be split."""
    whole = local(p.detach())
    if not can_split(whole):
        return nn.Parameter(p.detach())
    part, placements = whole[_own_rows(whole, mesh)], tuple[Placement, ...]([Shard(0)])
    if isinstance(p, DTensor):
        # Shard the part as FSDP2 does, which launcher.train.checkpoints and the 8-bit states support.
        cut = math.prod(
            size
            for size, placement in zip(p.device_mesh.shape, p.placements, strict=True)
            if placement.is_shard(0)
        )
        by_rows = _StridedShard(0, split_factor=cut) if cut > 1 else Shard(0)
        mesh, placements = DeviceMesh._concatenate([mesh, p.device_mesh]), (by_rows, *p.placements)
    spec = DTensorSpec(mesh, placements, TensorMeta(p.shape, p.stride(), p.dtype))
    return nn.Parameter(DTensor(part, spec, requires_grad=False))  # type: ignore[no-untyped-call]


def _own_rows(whole: torch.Tensor, mesh: DeviceMesh) -> slice:
    """Return the rows of `whole` that this rank of `mesh` has."""
    size = math.ceil(whole.shape[0] / mesh.size())
    start = min(mesh.get_local_rank() * size, whole.shape[0])
    return slice(start, start + size)


def _flat(dense: torch.Tensor) -> torch.Tensor:
    """Return the memory of a dense tensor as a vector."""
    return dense.as_strided((dense.numel(),), (1,))


def _padded(p: torch.Tensor, ranks: int) -> int:
    """Return the bytes of a parameter with as many rows on each rank as on the first."""
    return math.ceil(p.shape[0] / ranks) * ranks * (p.numel() // max(1, p.shape[0])) * p.itemsize

"""`sharding: zero1`: parameters and gradients are whole on every rank, optimizer states are sharded.

Not torch's ZeroRedundancyOptimizer: it gives whole parameters to ranks, so one large embedding decides how
much a rank holds, and its states must be collected on one rank before torch.distributed.checkpoint sees them.
Here states are sharded by rows like FSDP2's, so any optimizer that runs under FSDP2 runs here, and the states
are saved and resharded in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from launcher.train.optimizers.proxies import Groups, Make, ProxyOptimizer
from launcher.train.optimizers.state import local, sharded_like

_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ShardedStates(ProxyOptimizer):
    """An optimizer that updates this rank's rows of each parameter, then gathers the rows of all ranks.

    A proxy is this rank's rows as a DTensor that shares their memory. Rows are split as FSDP2 does. Every
    rank keeps all states of a parameter that cannot be split: one without dimensions, or one whose rows are
    not contiguous in memory.
    """

    def __init__(self, groups: Groups, wide: Collection[torch.Tensor], make: Make, mesh: DeviceMesh) -> None:
        super().__init__(groups, wide, make, lambda p: _rows(p, mesh))
        self._mesh = mesh
        self.follow_inner()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters. `closure` is ignored; torch.distributed.checkpoint passes None by name.

        Every rank must have gradients for the same parameters, as DDP ensures.
        """
        self.lead_inner()
        updated = [p for p in self.proxies if p.grad is not None]
        for p in updated:
            proxy = self.proxies[p]
            proxy.grad = sharded_like(proxy, _part(p.grad, proxy), p.shape)
        try:
            self.inner.step()
        finally:
            for p in updated:
                self.proxies[p].grad = None
        self.follow_inner()
        self._gather(updated)

    @property
    def gather_bytes(self) -> int:
        """The bytes of the largest buffer that gathering allocates."""
        return max((_padded(p, self._mesh.size()) for p in self.proxies if self._needs_buffer(p)), default=0)

    def lead_inner(self) -> None:
        super().lead_inner()
        for p, proxy in self.proxies.items():
            if p not in self.state:  # dropped by the reader of a checkpoint that has none
                self.inner.state.pop(proxy, None)

    def _gather(self, updated: Sequence[torch.Tensor]) -> None:
        """Fill the parameters with the rows of all ranks: in place if all ranks have equally many rows."""
        group, buffered, started = self._mesh.get_group(), [], []
        for p in updated:
            if self._needs_buffer(p):
                buffered.append(p)
            elif isinstance(self.proxies[p], DTensor):
                rows = _flat(local(self.proxies[p]))
                started.append(_all_gather(_flat(p.detach()), rows, group=group, async_op=True))
        for work in started:
            work.wait()
        for p in buffered:
            self._gather_uneven(p)

    def _gather_uneven(self, p: torch.Tensor) -> None:
        ranks, rows = self._mesh.size(), local(self.proxies[p])
        buffer = torch.empty(_padded(p, ranks) // p.itemsize, dtype=p.dtype, device=p.device)
        own = buffer.chunk(ranks)[self._mesh.get_local_rank()]
        own[: rows.numel()].copy_(_flat(rows))
        _all_gather(buffer, own, group=self._mesh.get_group())
        _flat(p.detach()).copy_(buffer[: p.numel()])  # only the last rows are padding

    def _needs_buffer(self, p: torch.Tensor) -> bool:
        return isinstance(self.proxies[p], DTensor) and p.shape[0] % self._mesh.size() != 0


def _rows(p: torch.Tensor, mesh: DeviceMesh) -> nn.Parameter:
    """Return this rank's rows of `p` as a DTensor in its memory, or all of `p` if it cannot be split."""
    whole = p.detach()
    if not p.ndim or p.stride(0) * p.shape[0] != p.numel() or not _dense(p):
        return nn.Parameter(whole)
    size = math.ceil(p.shape[0] / mesh.size())
    start = min(mesh.get_local_rank() * size, p.shape[0])
    part = whole[start : start + size]
    spec = DTensorSpec(mesh, (Shard(0),), TensorMeta(p.shape, p.stride(), p.dtype))
    return nn.Parameter(DTensor(part, spec, requires_grad=False))  # type: ignore[no-untyped-call]


def _dense(p: torch.Tensor) -> bool:
    """Return whether the tensor fills its memory without gaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(p.stride(), p.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _part(gradient: torch.Tensor, proxy: torch.Tensor) -> torch.Tensor:
    """Return the rows of a whole gradient that belong to the proxy."""
    if not isinstance(proxy, DTensor):
        return gradient
    rows = local(proxy)
    size = math.ceil(proxy.shape[0] / proxy.device_mesh.size())
    start = min(proxy.device_mesh.get_local_rank() * size, proxy.shape[0])
    return gradient[start : start + rows.shape[0]]


def _flat(dense: torch.Tensor) -> torch.Tensor:
    """Return the memory of a dense tensor as a vector."""
    return dense.as_strided((dense.numel(),), (1,))


def _padded(p: torch.Tensor, ranks: int) -> int:
    """Return the bytes of a parameter with as many rows on each rank as on the first."""
    return math.ceil(p.shape[0] / ranks) * ranks * (p.numel() // p.shape[0]) * p.itemsize

"""`sharding: ddp` and `zero1` with tensor or pipeline parallelism: data-parallel ranks with the same part of
the model.

torch's DistributedDataParallel is not used: it expects the backward pass of a micro-batch right after its
forward pass, and supports no DTensor. Here gradients are averaged in place, once per step, after its last
backward pass.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from launcher.train.local_shards import local
from launcher.train.sharding.first_rank import copy_from_first


class Replicas:
    """The parameters of this rank, which all ranks of `mesh` hold."""

    @torch.no_grad()
    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """All ranks get the parameters and buffers of the first one. Every rank must call this."""
        self._group, self._ranks = mesh.get_group(), mesh.size()
        self._trained = [p for p in model.parameters() if p.requires_grad]
        for tensor in (*model.parameters(), *model.buffers()):
            copy_from_first(tensor, self._group)

    @torch.no_grad()
    def average(self) -> None:
        """Average the gradients in place. A gradient that only some ranks have is zero on the others."""
        used_anywhere = torch.tensor([p.grad is not None for p in self._trained], dtype=torch.int32)
        used_anywhere = used_anywhere.to(local(self._trained[0].detach()).device)
        dist.all_reduce(used_anywhere, op=dist.ReduceOp.MAX, group=self._group)
        gradients = []
        for p, used in zip(self._trained, used_anywhere.tolist(), strict=True):
            if used:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                gradients.append(local(p.grad))
        # Divided first, as DDP does: a sum in 16 bit may overflow.
        torch._foreach_div_(gradients, self._ranks)
        sums = [gradient.contiguous() for gradient in gradients]
        for work in [dist.all_reduce(each, group=self._group, async_op=True) for each in sums]:
            assert work is not None
            work.wait()
        for gradient, reduced in zip(gradients, sums, strict=True):
            if reduced is not gradient:
                gradient.copy_(reduced)

"""Cross-entropy of logits whose vocabulary is cut over the ranks, without gathering them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from launcher.train.local_shards import offset_of


def cross_entropy(logits: DTensor, targets: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Return the sum of the cross-entropies, in fp32 and the same on each rank.

    `logits` is (n, vocabulary), cut by columns; `targets` (n,) is whole on each rank.
    """
    [placement] = logits.placements
    assert placement == Shard(1), f"logits cut as {placement}"
    first, group = offset_of(logits)[1][1], logits.device_mesh.get_group()
    total: torch.Tensor = _CrossEntropy.apply(logits.to_local(), targets, ignore_index, first, group)  # type: ignore[no-untyped-call]
    return total


class _CrossEntropy(torch.autograd.Function):
    """Two small all-reduces: the largest logit of each row; the sum of exponentials and the target's logit.
    Source: Megatron-LM, arXiv 1909.08053, section 3."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        ignore_index: int,
        first: int,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.dtype, values = logits.dtype, logits.float()
        if not values.shape[1]:  # there are more ranks than parts
            values = values.new_full((len(values), 1), -torch.inf)
        largest = values.amax(dim=1, keepdim=True)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        values = values - largest
        own = targets - first
        is_here = (own >= 0) & (own < logits.shape[1]) & (targets != ignore_index)
        own = own.clamp(0, values.shape[1] - 1)
        picked = values.gather(1, own[:, None]).squeeze(1).masked_fill(~is_here, 0.0)
        values.exp_()
        sums = torch.stack((values.sum(dim=1), picked))
        dist.all_reduce(sums, group=group)
        losses = (sums[0].log() - sums[1]).masked_fill(targets == ignore_index, 0.0)
        probabilities = values.div_(sums[0][:, None])[:, : logits.shape[1]]
        ctx.save_for_backward(probabilities, own, is_here, targets == ignore_index)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        probabilities, own, is_here, ignored = ctx.saved_tensors
        gradients = probabilities.clone()
        if gradients.shape[1]:
            gradients.scatter_add_(1, own[:, None], -is_here[:, None].to(gradients.dtype))
        gradients.mul_(gradient).masked_fill_(ignored[:, None], 0.0)
        return gradients.to(ctx.dtype), None, None, None, None

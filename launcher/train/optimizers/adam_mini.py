"""Adam-mini: one second moment per block of parameters (arXiv 2406.16793), with decoupled weight decay."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from launcher.train.local_shards import column_cuts, local
from launcher.train.optimizers.state import OwnOptimizer, rows_sharded_like, zeros_sharded_like


class AdamMini(OwnOptimizer):
    """Adam-mini with one block per row of a parameter: an output neuron, or a token of an embedding.

    The paper does the same, except for query and key, which it partitions by attention head. These cannot be
    identified from outside the model; rows are finer and closer to Adam. The rows of a vector (gain, bias)
    have one element, so its update is Adam's. FSDP keeps rows whole. Where tensor parallelism cuts them, the
    ranks add up their parts of a row, so the update does not depend on the number of ranks. The first moment
    has the parameter's type, the second is fp32.
    """

    def __init__(self, groups: list[dict[str, Any]], *, lr: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0})

    def _begin(self, p: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
        state["step"] = torch.zeros((), dtype=torch.float32)
        state["exp_avg"] = zeros_sharded_like(p, p.dtype)
        ones = (1,) * (p.ndim - 1)
        state["exp_avg_sq"] = (
            rows_sharded_like(p, ones, torch.float32) if p.ndim else zeros_sharded_like(p, torch.float32)
        )

    def _update(self, p: torch.Tensor, state: dict[str, torch.Tensor], group: dict[str, Any]) -> None:
        lr, (beta1, beta2), step = group["lr"], group["betas"], int(state["step"])
        shard, gradient = local(p), local(p.grad)  # type: ignore[arg-type]
        first, second = local(state["exp_avg"]), local(state["exp_avg_sq"])

        first.lerp_(gradient, 1 - beta1)
        square = gradient.float().square()
        if square.ndim > 1:
            square = _row_means(square, p)
        second.lerp_(square, 1 - beta2)

        root = second.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
        update = first.div(root).div_(1 - beta1**step)
        shard.sub_(update.add_(shard, alpha=group["weight_decay"]), alpha=lr)


def _row_means(square: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Return the mean of each row of `p`, of which `square` is this rank's part: (rows, 1, ...)."""
    sums = square.sum(dim=tuple(range(1, square.ndim)), keepdim=True)
    for cut in column_cuts(p):
        assert isinstance(p, DTensor)
        dist.all_reduce(sums, group=p.device_mesh.get_group(cut))
    return sums.div_(math.prod(p.shape[1:]))

"""Lion: one state per parameter, in the parameter's type (arXiv 2302.06675, algorithm 2)."""

from __future__ import annotations

from typing import Any

import torch

from launcher.train.local_shards import local
from launcher.train.optimizers.state import OwnOptimizer, zeros_sharded_like


class Lion(OwnOptimizer):
    """Lion. Its update is a sign, so the learning rate is usually a third to a tenth of AdamW's."""

    def __init__(self, groups: list[dict[str, Any]], *, lr: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.0})

    def _begin(self, p: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
        state["exp_avg"] = zeros_sharded_like(p, p.dtype)

    def _update(self, p: torch.Tensor, state: dict[str, torch.Tensor], group: dict[str, Any]) -> None:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        shard, gradient, average = local(p), local(p.grad), local(state["exp_avg"])  # type: ignore[arg-type]
        direction = average.lerp(gradient, 1 - beta1).sign_()
        shard.mul_(1 - lr * group["weight_decay"]).add_(direction, alpha=-lr)
        average.lerp_(gradient, 1 - beta2)

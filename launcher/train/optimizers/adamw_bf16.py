"""AdamW with both states in bf16: 4 bytes per parameter whatever the parameter's type."""

from __future__ import annotations

import math
from typing import Any

import torch

from launcher.train.local_shards import local
from launcher.train.optimizers.state import OwnOptimizer, zeros_sharded_like


class AdamWBf16(OwnOptimizer):
    """AdamW with bf16 states and fp32 arithmetic. Temporaries have the size of the largest parameter.

    The second moment is rounded stochastically. With beta2 = 0.999 it shrinks by a thousandth per step, which
    is less than half of bf16's last place (2^-9): with rounding to nearest it could grow but never shrink.
    """

    def __init__(self, groups: list[dict[str, Any]], *, lr: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0})
        # The numbers stay fixed: offload runs a step for one parameter at a time.
        self._numbers = {id(p): n for n, p in enumerate(p for g in self.param_groups for p in g["params"])}

    def _begin(self, p: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
        state["step"] = torch.zeros((), dtype=torch.float32)
        state["exp_avg"] = zeros_sharded_like(p, torch.bfloat16)
        state["exp_avg_sq"] = zeros_sharded_like(p, torch.bfloat16)

    def _update(self, p: torch.Tensor, state: dict[str, torch.Tensor], group: dict[str, Any]) -> None:
        lr, (beta1, beta2), step = group["lr"], group["betas"], int(state["step"])
        seed = step * len(self._numbers) + self._numbers[id(p)]
        shard, gradient = local(p), local(p.grad).float()  # type: ignore[arg-type]
        first, second = local(state["exp_avg"]), local(state["exp_avg_sq"])

        mean = first.float().lerp_(gradient, 1 - beta1)
        square = second.float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        first.copy_(mean)
        second.copy_(round_stochastically(square, seed))

        root = square.sqrt_().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
        update = mean.div_(root).div_(1 - beta1**step)
        # Decay and update are one subtraction: in bf16 the decay alone would be rounded to nothing.
        shard.sub_(update.add_(shard, alpha=group["weight_decay"]), alpha=lr)


def round_stochastically(x: torch.Tensor, seed: int) -> torch.Tensor:
    """Round fp32 to one of the two bf16 neighbours, so that the mean of many roundings is `x`.

    Rounding depends only on `seed`: replicas of a parameter stay equal, and a resumed run gets the same
    results as an uninterrupted one.
    """
    generator = torch.Generator(x.device).manual_seed(seed)
    noise = torch.randint(2**16, x.shape, dtype=torch.int32, device=x.device, generator=generator)
    # bf16 is the upper half of fp32. The lower half carries with a probability proportional to its value.
    return noise.add_(x.view(torch.int32)).bitwise_and_(-(2**16)).view(torch.float32).bfloat16()

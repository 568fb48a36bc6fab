"""AdamW with both states in bf16: 4 bytes per parameter whatever the parameter's type."""

from __future__ import annotations

import math
from typing import Any

import torch

from launcher.train.optimizers.state import KeepsDtypes, local, zeros_sharded_like


class AdamWBf16(KeepsDtypes):
    """The arithmetic is fp32, with temporaries of the largest parameter's size.

    The second moment is rounded stochastically. With beta2 = 0.999 it shrinks by a thousandth a step, which
    is below half of bf16's last place (2^-9): rounded to the nearest it could grow but never shrink again.
    """

    def __init__(
        self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float] = (0.9, 0.999)
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": 1e-8, "weight_decay": 0.0})
        # Kept from here on: offload steps one parameter at a time.
        self._numbers = {id(p): n for n, p in enumerate(p for g in self.param_groups for p in g["params"])}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg"] = zeros_sharded_like(p, torch.bfloat16)
                    state["exp_avg_sq"] = zeros_sharded_like(p, torch.bfloat16)
                state["step"] += 1
                seed = int(state["step"]) * len(self._numbers) + self._numbers[id(p)]
                _update(p, state, group, seed)


def _update(p: torch.Tensor, state: dict[str, Any], group: dict[str, Any], seed: int) -> None:
    lr, (beta1, beta2), step = group["lr"], group["betas"], int(state["step"])
    shard, gradient = local(p), local(p.grad).float()  # type: ignore[arg-type]
    first, second = local(state["exp_avg"]), local(state["exp_avg_sq"])

    mean = first.float().lerp_(gradient, 1 - beta1)
    square = second.float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    first.copy_(mean)
    second.copy_(round_stochastically(square, seed))

    root = square.sqrt_().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
    update = mean.div_(root).div_(1 - beta1**step)
    # Decay and update in one subtraction: in bf16 the decay alone would be rounded away.
    shard.sub_(update.add_(shard, alpha=group["weight_decay"]), alpha=lr)


def round_stochastically(x: torch.Tensor, seed: int) -> torch.Tensor:
    """fp32 -> the bf16 neighbours, the nearer one more often, so that the mean of many roundings is `x`.

    The same `seed` rounds the same way on every rank: replicas of a parameter stay equal, and a resumed run
    repeats what an undisturbed one does.
    """
    generator = torch.Generator(x.device).manual_seed(seed)
    noise = torch.randint(2**16, x.shape, dtype=torch.int32, device=x.device, generator=generator)
    # bf16 is the upper half of fp32: the carry out of the lower half happens as often as that half is large.
    return noise.add_(x.view(torch.int32)).bitwise_and_(-(2**16)).view(torch.float32).bfloat16()

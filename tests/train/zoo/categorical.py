"""A policy with cosine logits: with weights of zero they are NaN, which forward refuses."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from zoo.tasks import TARGETS, Residual, Stack, Vectors


class Policy(Vectors):
    def model(self) -> nn.Module:
        return Cosine()

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        """The policy gradient: the actions are drawn."""
        inputs, rewards = batch
        log_probabilities, actions = model(inputs)
        reward = rewards.gather(1, actions[:, None]).squeeze(1)
        return -(log_probabilities * reward).sum(), len(inputs)


class Cosine(Stack):
    def __init__(self) -> None:
        super().__init__(blocks=[Residual(16), Residual(16), Residual(16), Directions(16)])
        self.last = nn.Identity()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = super().forward(x)
        assert bool(logits.isfinite().all()), "logits that are not finite"
        chosen = torch.distributions.Categorical(logits=logits)
        actions = chosen.sample()
        return chosen.log_prob(actions), actions


class Directions(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, TARGETS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        directions = self.linear.weight / self.linear.weight.norm(dim=1, keepdim=True)
        return functional.linear(self.norm(x), directions)

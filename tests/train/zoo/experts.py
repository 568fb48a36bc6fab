"""A mixture of experts: each token goes to one, and the ranks use different ones."""

from __future__ import annotations

import torch
from torch import nn

from zoo.tasks import Residual, Stack, Vectors

EXPERTS = 6


class Experts(Vectors):
    def model(self) -> nn.Module:
        return Stack(blocks=[Routed(16) for _ in range(2)])


class Routed(nn.Module):
    """Its experts are in a dictionary, and so no units of their own: that would be other collectives."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, EXPERTS)
        self.experts = nn.ModuleDict({str(number): Residual(width) for number in range(EXPERTS)})
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.router(x).softmax(-1)
        share, chosen = shares.max(-1)
        mixed = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            rows = (chosen == number).nonzero().squeeze(1)
            mixed = mixed.index_add(0, rows, self.experts[str(number)](x[rows]) * share[rows, None])
        return x + self.out(mixed)

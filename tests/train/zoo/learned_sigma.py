"""A likelihood with a learned sigma in a single row: `Normal` refuses one that is not positive."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zoo.tasks import TARGETS, Stack, Vectors


class LearnedSigma(Vectors):
    def model(self) -> nn.Module:
        return Gaussian()

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        inputs, targets = batch
        return -model(inputs, targets).sum(), len(inputs)


class Gaussian(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.sigma = nn.Parameter(torch.ones(1, TARGETS))

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.distributions.Normal(super().forward(x), self.sigma).log_prob(targets)

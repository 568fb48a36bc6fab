"""Dropout and stochastic depth, drawn from the generators of torch, Python and numpy."""

from __future__ import annotations

import random

import numpy
import torch
from torch import nn

from zoo.tasks import Residual, Stack, Vectors

KEPT = 0.7


class StochasticDepth(Vectors):
    def model(self) -> nn.Module:
        return Stack(blocks=[Dropped(16, dropout=0.2) for _ in range(3)])


class Dropped(Residual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(x)
        by_sample = torch.rand(len(x), 1) < KEPT
        by_python = torch.tensor([[random.random() < KEPT] for _ in x])
        by_numpy = torch.from_numpy(numpy.random.rand(len(x), 1) < KEPT)
        return x + (super().forward(x) - x) * (by_sample & by_python & by_numpy) / KEPT

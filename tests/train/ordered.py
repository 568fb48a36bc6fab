"""A model that checks its parameters: the edges of its bins must rise from row to row."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from launcher.train import Task

ROWS, WIDTH = 2**10, 2**9
"2 MiB in fp32."


class Ordered(Task):
    def model(self) -> nn.Module:
        return Bins()

    def data(self, split: str) -> Any:
        return torch.utils.data.TensorDataset(torch.rand(64, 4, generator=torch.Generator().manual_seed(0)))

    def loss(self, model: nn.Module, batch: Any) -> Any:
        (x,) = batch
        return model(x).square().sum(), len(x)


class Bins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.edges = nn.Parameter(torch.arange(float(ROWS)).view(ROWS, 1).repeat(1, WIDTH))
        self.last = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not (self.edges[1:] > self.edges[:-1]).all():
            raise ValueError("the edges are not in order")
        return self.last(x) + 1e-9 * self.edges.sum()

"""A model whose ranks differ in their buffers and extra states: BatchNorm, Dropout, a counter, a list of
samples that grows, a running mean, and tied weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from launcher.train import Task

CLASSES = 24


class Normed(Task):
    def __init__(self, dim: int = 16, dropout: float = 0.2) -> None:
        self.dim, self.dropout = dim, dropout

    def model(self) -> nn.Module:
        return Network(self.dim, self.dropout)

    def data(self, split: str) -> Any:
        generator = torch.Generator().manual_seed(0)
        return torch.utils.data.TensorDataset(torch.randint(0, CLASSES, (64,), generator=generator))

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        (classes,) = batch
        return functional.cross_entropy(model(classes), classes, reduction="sum"), len(classes)


class Network(nn.Module):
    def __init__(self, dim: int, dropout: float = 0.2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, dim)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, dim), nn.BatchNorm1d(dim), nn.Dropout(dropout)) for _ in range(2)
        )
        self.head = nn.Linear(dim, CLASSES, bias=False)
        self.head.weight = self.embedding.weight
        self.level = Level(dim)
        self.register_buffer("seen", torch.zeros(CLASSES), persistent=False)
        self.register_buffer("recent", torch.zeros(0, dtype=torch.int64))
        self.register_buffer("scale", torch.full((dim,), 0.5), persistent=False)

    def forward(self, classes: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += functional.one_hot(classes, CLASSES).sum(0)
            self.recent = torch.cat([self.recent, classes])[-6:]
        x = self.level(self.embedding(classes) * self.scale)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Level(nn.Module):
    """Adds the running mean of the earlier passes of this rank, which is an extra state."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mean = torch.zeros(dim)

    def get_extra_state(self) -> torch.Tensor:
        return self.mean

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.mean = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.mean.to(x)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0).to(self.mean)
        return y

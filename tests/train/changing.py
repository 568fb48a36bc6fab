"""A model that changes its buffers in every way there is, and draws random numbers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from launcher.train import Task

CLASSES = 24


class ChangingTask(Task):
    def __init__(self, dim: int = 16) -> None:
        self.dim = dim

    def model(self) -> nn.Module:
        return Changing(self.dim)

    def data(self, split: str) -> Any:
        generator = torch.Generator().manual_seed(0)
        return torch.utils.data.TensorDataset(torch.randint(0, CLASSES, (64,), generator=generator))

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        (classes,) = batch
        return functional.cross_entropy(model(classes), classes, reduction="sum"), len(classes)


class Synced(ChangingTask):
    def model(self) -> nn.Module:
        return nn.SyncBatchNorm.convert_sync_batchnorm(super().model())


class Gathering(ChangingTask):
    """A loss over all ranks."""

    def blocks(self, model: Any) -> Any:
        return model.layers

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        total, weight = super().loss(model, batch)
        dist.all_reduce(total.detach().clone())
        return total, weight


class Changing(nn.Module):
    """Counts, replaces, resizes, registers, and changes behind torch's back."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, dim)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, dim), nn.BatchNorm1d(dim), nn.Dropout(0.2)) for _ in range(2)
        )
        self.head = nn.Linear(dim, CLASSES)
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.register_buffer("average", torch.zeros(dim), persistent=False)
        self.register_buffer("behind", torch.zeros(3))
        self.register_buffer("resized", torch.zeros(2), persistent=False)
        self.register_buffer("later", None)
        self.register_buffer("constant", torch.arange(100.0), persistent=False)

    def forward(self, classes: torch.Tensor) -> torch.Tensor:
        x = self.embedding(classes) + self.average + self.constant[:1]
        for layer in self.layers:
            x = x + layer(x)
        if self.training:
            self.cache = torch.cat([self.cache, torch.rand(1)])
            self.average = 0.9 * self.average + 0.1 * torch.rand_like(self.average)
            self.behind.data.add_(1)
            self.resized.resize_(len(self.cache)).fill_(len(self.cache))
            self.later = torch.ones(1) if self.later is None else self.later + 1
            if "registered" not in self._buffers:
                self.register_buffer("registered", torch.rand(2), persistent=False)
            self.registered += 1
        return self.head(x)

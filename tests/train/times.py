"""A task whose inputs are precise: times of up to a thousand, of which the model computes sines."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from launcher.train.task import Task

DIM = 16


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offsets", torch.arange(300.0, 308.0))
        self.norm, self.inner = nn.LayerNorm(2 * DIM), nn.Linear(2 * DIM, DIM)
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
        self.out = nn.Linear(DIM, 1)

    def forward(self, times: torch.Tensor) -> torch.Tensor:
        angles = times[:, None].float() * torch.linspace(0.1, 0.4, DIM)
        features = torch.cat([angles.sin(), angles.cos()], 1)
        x = self.inner(self.norm(features.to(self.norm.weight.dtype)))
        for block in self.blocks:
            x = x + block(x)
        result: torch.Tensor = self.out(x)
        return result


class Times(Task):
    def model(self) -> nn.Module:
        return Waves()

    def blocks(self, model: Any) -> list[nn.Module]:
        return [*model.blocks]

    def data(self, split: str) -> torch.Tensor:
        return torch.linspace(0.0, 999.0, 64)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        return functional.mse_loss(model(batch)[:, 0], torch.sin(batch * 0.2), reduction="sum"), len(batch)

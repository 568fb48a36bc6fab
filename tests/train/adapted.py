"""Tasks whose layers have an adapter, and whose models read weights without calling the layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from launcher.train import Task

DIM = 64


class Block(nn.Module):
    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(DIM, 4, 2 * DIM, dropout=0.0, batch_first=True)
        self.up = nn.Linear(DIM, DIM)
        self.again = self.up
        self.read = nn.Linear(DIM, DIM)
        if keeps:
            self.kept = nn.Linear(DIM, DIM)
        self.elsewhere = [self.kept.weight] if keeps else []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.encoder(x)
        x = x + functional.linear(x, self.read.weight, self.read.bias)
        for weight in self.elsewhere:
            x = x + functional.linear(x, weight)
        return x + self.again(torch.tanh(self.up(x)))


class Model(nn.Module):
    scale: torch.Tensor
    level: torch.Tensor

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, DIM)
        self.blocks = nn.ModuleList(Block(keeps) for _ in range(2))
        self.head = nn.Linear(DIM, 50)
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("level", torch.zeros(1))
        self.follows = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) * self.scale
        if self.follows and self.training:
            self.level.lerp_(x.detach().mean(), 0.1)
            x = x - self.level
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


class Encoder(Task):
    """`keeps`: its blocks use a parameter that a list holds, too."""

    def __init__(self, keeps: bool = False) -> None:
        self.keeps = keeps

    def model(self) -> nn.Module:
        torch.manual_seed(7)
        return Model(self.keeps)

    def data(self, split: str) -> Any:
        return torch.randint(0, 50, (32, 9), generator=torch.Generator().manual_seed(len(split)))

    def loss(self, model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, float]:
        logits, targets = model(batch).flatten(0, 1).float(), ((batch + 1) % 50).flatten()
        return functional.cross_entropy(logits, targets, reduction="sum"), float(targets.numel())


class Following(Encoder):
    """Its model changes a buffer in training."""

    def model(self) -> nn.Module:
        model = super().model()
        model.follows = True  # type: ignore[assignment]
        return model


class Normed(Encoder):
    """A weight of its model is no parameter."""

    def model(self) -> nn.Module:
        model: Any = super().model()
        for block in model.blocks:
            nn.utils.weight_norm(block.up)  # type: ignore[no-untyped-call]
        return model  # type: ignore[no-any-return]


class Tied(Encoder):
    """Two of its layers have one weight."""

    def model(self) -> nn.Module:
        model: Any = super().model()
        model.blocks[1].read.weight = model.blocks[0].read.weight
        return model  # type: ignore[no-any-return]

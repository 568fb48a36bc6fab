"""Data, losses and blocks that the models of the zoo share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from launcher.train import Task

SAMPLES, FEATURES, TARGETS = 64, 8, 4
VOCABULARY, LENGTH = 32, 12
SIDE = 8


class Vectors(Task):
    """Regression from FEATURES to TARGETS numbers. Subclasses give the model."""

    def data(self, split: str) -> Any:
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
        return torch.utils.data.TensorDataset(inputs, torch.sin(inputs[:, :TARGETS] * 2))

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        inputs, targets = batch
        return (model(inputs) - targets).square().sum(), len(inputs)


class Tokens(Task):
    """Next token of sequences of LENGTH tokens."""

    def data(self, split: str) -> Any:
        generator = torch.Generator().manual_seed(2)
        return torch.utils.data.TensorDataset(
            torch.randint(0, VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)
        )

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        (tokens,) = batch
        logits = model(tokens[:, :-1]).flatten(0, 1)
        targets = tokens[:, 1:].flatten()
        return functional.cross_entropy(logits, targets, reduction="sum"), len(targets)


class Images(Task):
    """SIDE x SIDE pictures with one channel and no label. Subclasses give the loss."""

    def data(self, split: str) -> Any:
        generator = torch.Generator().manual_seed(3)
        return torch.utils.data.TensorDataset(torch.randn(SAMPLES, 1, SIDE, SIDE, generator=generator))


class Residual(nn.Module):
    """One hidden layer beside the identity."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.dropout(torch.tanh(self.up(x))))


class Stack(nn.Module):
    """Linear, blocks, linear. Subclasses change `hidden`, which is called before the blocks."""

    def __init__(
        self, width: int = 16, blocks: list[nn.Module] | None = None, inputs: int = FEATURES
    ) -> None:
        super().__init__()
        self.width = width
        self.first = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(blocks or [Residual(width) for _ in range(3)])
        self.last = nn.Linear(width, TARGETS)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.hidden(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.last(x)

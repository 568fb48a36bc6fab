"""A masked autoencoder: forward draws the rows that its encoder sees."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zoo.tasks import SIDE, Images, Residual

WIDTH, SEEN = 16, 3


class MaskedAutoencoder(Images):
    def model(self) -> nn.Module:
        return Autoencoder()

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        (images,) = batch
        rows = images.squeeze(1)
        found, hidden = model(rows)
        return ((found - rows).square() * hidden).sum(), len(images)


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.unpatch = nn.Linear(SIDE, WIDTH), nn.Linear(WIDTH, SIDE)
        self.places = nn.Parameter(torch.randn(SIDE, WIDTH))
        self.missing = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.encoder = nn.ModuleList(Layer() for _ in range(2))
        self.decoder = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen = torch.rand(rows.shape[:2]).argsort(1)[:, :SEEN, None]
        every = self.patch(rows) + self.places
        x = every.gather(1, seen.expand(-1, -1, WIDTH))
        for layer in self.encoder:
            x = layer(x)
        whole = self.missing.expand(*rows.shape[:2], WIDTH).scatter(1, seen.expand(-1, -1, WIDTH), x)
        whole = whole + self.places
        for layer in self.decoder:
            whole = layer(whole)
        hidden = torch.ones(*rows.shape[:2], 1).scatter(1, seen, 0.0)
        return self.unpatch(whole), hidden


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Residual(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return self.mlp(x + self.attention(x, x, x, need_weights=False)[0])

"""Attention with one learned temperature for each block, which forward requires to be positive."""

from __future__ import annotations

import torch
from torch import nn

from zoo.tasks import VOCABULARY, Tokens


class Temperature(Tokens):
    def model(self) -> nn.Module:
        return Sharpened()


class Sharpened(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Attention(width) for _ in range(3))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.projection, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.temperature = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not bool((self.temperature > 0).all()):
            raise ValueError(f"the temperature is {self.temperature.tolist()}, it must be positive")
        q, k, v = self.projection(x).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / self.temperature
        mask = torch.ones_like(scores, dtype=torch.bool).triu(1)
        return x + self.out(scores.masked_fill(mask, float("-inf")).softmax(-1) @ v)

"""Large tables of which a batch uses a few rows: `Embedding` and `EmbeddingBag`.

With `sparse=True` none of the optimizers of a recipe accepts the gradients, so they are dense here.
"""

from __future__ import annotations

import torch
from torch import nn

from zoo.tasks import LENGTH, VOCABULARY, Residual, Tokens

ROWS, WIDTH = 2000, 16


class Embeddings(Tokens):
    def model(self) -> nn.Module:
        return Tables()


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.pairs = nn.EmbeddingBag(ROWS, WIDTH, mode="sum")
        self.blocks = nn.ModuleList(Residual(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        pairs = (tokens[:, :, None] * tokens[:, None, :]) % ROWS
        x = self.token(tokens) + self.pairs(pairs.flatten(0, 1)).view(-1, LENGTH, WIDTH)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

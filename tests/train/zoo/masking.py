"""A masked language model: `collate` draws the masks, the model has dropout."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn import functional

from zoo.tasks import LENGTH, VOCABULARY, Residual, Tokens

MASK = 0


class Masking(Tokens):
    def model(self) -> nn.Module:
        blocks = [nn.Embedding(VOCABULARY, 16), *(Residual(16, dropout=0.2) for _ in range(3))]
        return Bidirectional(blocks[0], nn.ModuleList(blocks[1:]))

    def collate(self, samples: list[Any]) -> dict[str, torch.Tensor]:
        tokens = torch.stack([sample[0] for sample in samples])[:, :LENGTH]
        masked = torch.rand(tokens.shape) < 0.2
        masked[:, random.randrange(LENGTH)] = True
        masked[:, numpy.random.randint(LENGTH)] = True
        return {"tokens": tokens.masked_fill(masked, MASK), "targets": tokens, "masked": masked}

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits = model(batch["tokens"])[batch["masked"]]
        targets = batch["targets"][batch["masked"]]
        return functional.cross_entropy(logits, targets, reduction="sum"), batch["masked"].sum()


class Bidirectional(nn.Module):
    def __init__(self, embedding: nn.Module, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.embedding, self.blocks = embedding, blocks
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
            x = x + x.mean(1, keepdim=True)
        return self.head(x)

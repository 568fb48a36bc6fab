"""An LSTM whose hidden state is carried from batch to batch in an attribute."""

from __future__ import annotations

import torch
from torch import nn

from zoo.tasks import VOCABULARY, Tokens

WIDTH = 16


class CarriedState(Tokens):
    def model(self) -> nn.Module:
        return Recurrent()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.norm = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.LayerNorm(WIDTH)
        self.carried: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = None
        if self.carried is not None:
            state = tuple(one.expand(1, len(x), WIDTH).contiguous() for one in self.carried)
        found, left = self.lstm(x, state)
        if self.training and torch.is_grad_enabled():
            self.carried = tuple(one.detach().mean(1, keepdim=True) for one in left)
        return x + self.norm(found)

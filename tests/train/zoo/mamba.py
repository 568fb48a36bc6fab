"""A selective scan as in Mamba, in plain torch: what each step keeps depends on its input."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from zoo.tasks import VOCABULARY, Tokens

STATES = 4


class Mamba(Tokens):
    def model(self) -> nn.Module:
        return Scanned()


class Scanned(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inward, self.out = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.convolution = nn.Conv1d(width, width, 3, padding=2, groups=width)
        self.step, self.mixing = nn.Linear(width, width), nn.Linear(width, 2 * STATES)
        self.decay = nn.Parameter(torch.arange(1, STATES + 1).float().log().repeat(width, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, gate = self.inward(x).chunk(2, -1)
        x = functional.silu(self.convolution(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        step, (into, out) = functional.softplus(self.step(x)), self.mixing(x).split(STATES, -1)
        keeps = torch.exp(-step[..., None] * self.decay.exp())
        comes = (step * x)[..., None] * into[:, :, None, :]
        state, outputs = torch.zeros_like(comes[:, 0]), []
        for at in range(x.shape[1]):
            state = keeps[:, at] * state + comes[:, at]
            outputs.append((state * out[:, at, None, :]).sum(-1))
        return self.out(torch.stack(outputs, 1) * functional.silu(gate))

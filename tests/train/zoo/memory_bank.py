"""Contrast with a bank of past keys (MoCo): a large buffer written in slices, a pointer, a frozen encoder."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from zoo.tasks import TARGETS, Stack, Vectors

ROWS = 2**16 + 64
"Times TARGETS: above 1 MiB of fp32."
NEGATIVES = 32


class MemoryBank(Vectors):
    def model(self) -> nn.Module:
        return Moco()

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        inputs, _ = batch
        scores = model(inputs, inputs + torch.randn_like(inputs) / 10)
        wanted = torch.zeros(len(inputs), dtype=torch.int64)
        return functional.cross_entropy(scores * 5, wanted, reduction="sum"), len(inputs)


class Moco(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.ModuleList([Encoder()]).requires_grad_(False)
        self.queries = nn.ModuleList(copy.deepcopy(one) for one in self.keys).requires_grad_(True)
        self.register_buffer("bank", functional.normalize(torch.randn(ROWS, TARGETS), dim=1))
        self.register_buffer("at", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        for theirs, ours in zip(self.keys.parameters(), self.queries.parameters(), strict=True):
            theirs.data.mul_(0.9).add_(ours.data, alpha=0.1)
        query = functional.normalize(super().forward(x) + self.queries[0](x), dim=1)
        with torch.no_grad():
            key = functional.normalize(self.keys[0](other), dim=1)
        at = int(self.at)
        negatives = self.bank[torch.arange(at - NEGATIVES, at) % ROWS].clone()
        self.bank.data[at : at + len(key)] = key
        self.at.add_(len(key))
        return torch.cat([(query * key).sum(1, keepdim=True), query @ negatives.T], 1)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(8, 16), nn.Linear(16, TARGETS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.linear(x)))

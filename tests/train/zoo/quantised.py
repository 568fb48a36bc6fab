"""An int8 table in buffers above 1 MiB: one constant, one written in each pass."""

from __future__ import annotations

import torch
from torch import nn

from zoo.tasks import Residual, Stack, Vectors

ROWS = 2**16 + 64
"Times a width of 16: above 1 MiB of int8."


class Quantised(Vectors):
    def model(self) -> nn.Module:
        return Table()


class Table(Stack):
    def __init__(self) -> None:
        super().__init__(blocks=[Residual(16) for _ in range(2)])
        self.register_buffer("base", torch.randint(-127, 128, (ROWS, 16), dtype=torch.int8))
        self.register_buffer("residue", torch.zeros(ROWS, 16, dtype=torch.int8))
        self.register_buffer("scale", torch.full((1,), 1 / 127))

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        rows = (x.detach().sum(1).abs() * 1000).long() % ROWS
        found = (self.base[rows] + self.residue[rows]).to(x.dtype) * self.scale
        if self.training:
            change = (x.detach() * 10).round().clamp(-127, 127).to(torch.int8)
            self.residue.data[rows % 64] = change
            self.scale.data.mul_(0.99)
        return x + found + self.residue[:64].to(x.dtype).mean(0) * self.scale

"""Units of FSDP within units of FSDP."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from zoo.tasks import Residual, Stack, Vectors


class NestedUnits(Vectors):
    def model(self) -> nn.Module:
        return Stack(blocks=[Outer(16) for _ in range(2)])

    def blocks(self, model: nn.Module) -> Iterator[nn.Module]:
        for outer in model.blocks:
            yield outer
            yield outer.before
            yield outer.after


class Outer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.norm, self.after = Residual(width, 0.1), nn.LayerNorm(width), Residual(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.norm(self.before(x)))

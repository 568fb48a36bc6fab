"""Weight norm divides by the norm of each row; forward refuses activations that are not finite."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from zoo.tasks import Residual, Stack, Vectors


class WeightNorm(Vectors):
    def model(self) -> nn.Module:
        return Stack(blocks=[Normed(16) for _ in range(3)])


class Normed(Residual):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.up, self.down = weight_norm(self.up), weight_norm(self.down)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        if not bool(x.isfinite().all()):
            raise FloatingPointError("the activations are not finite")
        return x

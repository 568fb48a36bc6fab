"""Spectral norm: each forward pass goes on with a power iteration in buffers."""

from __future__ import annotations

from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from zoo.tasks import Residual, Stack, Vectors


class SpectralNorm(Vectors):
    def model(self) -> nn.Module:
        return Stack(blocks=[Normed(16) for _ in range(3)])


class Normed(Residual):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.up, self.down = spectral_norm(self.up), spectral_norm(self.down)

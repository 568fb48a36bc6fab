"""VQ-VAE: the codebook is a moving average in buffers above 1 MiB, written through `.data`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from zoo.tasks import SIDE, Images, Residual

CODES, WIDTH = 4200, 64
"Together 1.03 MiB in fp32."
DECAY = 0.9


class VqVae(Images):
    def model(self) -> nn.Module:
        return Autoencoder()

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        (images,) = batch
        flat = images.flatten(1)
        decoded, commitment = model(flat)
        return (decoded - flat).square().sum() + commitment / 4, len(images)


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(SIDE * SIDE, WIDTH)
        self.codebook = Codebook()
        self.blocks = nn.ModuleList(Residual(WIDTH) for _ in range(2))
        self.decoder = nn.Linear(WIDTH, SIDE * SIDE)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        encoded = self.encoder(x)
        code = self.codebook(encoded.detach())
        commitment = (encoded - code).square().sum()
        hidden = encoded + (code - encoded).detach()
        for block in self.blocks:
            hidden = block(hidden)
        return self.decoder(hidden), commitment


class Codebook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(CODES, WIDTH))
        self.register_buffer("sums", self.codes.clone())
        self.register_buffer("sizes", torch.ones(CODES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nearest = torch.cdist(x, self.codes).argmin(1)
        chosen = self.codes[nearest]
        if self.training:
            hits = functional.one_hot(nearest, CODES).to(x.dtype)
            self.sizes.data.mul_(DECAY).add_(hits.sum(0), alpha=1 - DECAY)
            self.sums.data.mul_(DECAY).add_(hits.T @ x, alpha=1 - DECAY)
            self.codes.data.copy_(self.sums / self.sizes.clamp_min(1e-3)[:, None])
        return chosen

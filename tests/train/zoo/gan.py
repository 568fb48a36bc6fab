"""A GAN in one loss: the discriminator is called twice, and what it learns from fakes reaches the generator
with the opposite sign."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from zoo.tasks import SIDE, Images, Residual

WIDTH = 16


class Gan(Images):
    def model(self) -> nn.Module:
        return Both()

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        (images,) = batch
        real, fake, features = model(images.flatten(1), torch.randn(len(images), WIDTH))
        discriminator = functional.softplus(-real).sum() + functional.softplus(fake).sum()
        return discriminator + features, len(images)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.ModuleList([Residual(WIDTH), Residual(WIDTH), Drawn(WIDTH, SIDE * SIDE)])
        self.discriminator = nn.ModuleList([Drawn(SIDE * SIDE, WIDTH), Residual(WIDTH), Drawn(WIDTH, 1)])

    def judged(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.discriminator[1](self.discriminator[0](x))
        return self.discriminator[2](hidden), hidden

    def forward(
        self, images: torch.Tensor, noise: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        for block in self.generator:
            noise = block(noise)
        real, features = self.judged(images)
        fake, found = self.judged(Reversed.apply(noise))
        return real, fake, -(features.detach() - found).abs().sum() / 10


class Drawn(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.act, self.linear = nn.LeakyReLU(0.2), nn.Linear(inputs, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.act(x))


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -gradient

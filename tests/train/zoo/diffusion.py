"""A diffusion U-Net: random times and noise in the loss, and a frozen average of its weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from zoo.tasks import Images

DECAY = 0.9
WIDTH = 8


class Diffusion(Images):
    def model(self) -> nn.Module:
        return Averaged(UNet())

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        (images,) = batch
        time, noise = torch.rand(len(images), 1, 1, 1), torch.randn_like(images)
        found = model(images * (1 - time) + noise * time, time.flatten(1))
        return (found - noise).square().sum(), len(images)


class Averaged(nn.Module):
    """The average is no unit of a list: FSDP has it in the unit of the root, as shards between the steps."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.average = copy.deepcopy(model).requires_grad_(False)
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.updates += 1
            for mean, now in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.data.lerp_(now.data, 1 - DECAY)
        return self.model(x, time)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Convolutions(1, WIDTH), Convolutions(WIDTH, 2 * WIDTH)])
        self.up = nn.ModuleList([Convolutions(3 * WIDTH, WIDTH)])
        self.out = nn.ModuleList([Convolutions(WIDTH, 1)])

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        whole = self.down[0](x, time)
        half = self.down[1](functional.avg_pool2d(whole, 2), time)
        joined = torch.cat([functional.interpolate(half, scale_factor=2.0), whole], 1)
        return self.out[0](self.up[0](joined, time), time)


class Convolutions(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, inputs)
        self.time = nn.Linear(1, inputs)
        self.convolution = nn.Conv2d(inputs, outputs, 3, padding=1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return self.convolution(functional.silu(self.norm(x) + self.time(time)[:, :, None, None]))

"""Noise from the author's own generators of torch, Python and numpy, in model and task; and a counter."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from torch import nn

from zoo.tasks import FEATURES, Stack, Vectors


class OwnGenerators(Vectors):
    def __init__(self) -> None:
        self.noise = torch.Generator().manual_seed(7)
        self.calls = 0

    def model(self) -> nn.Module:
        return Noisy()

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        self.calls += 1
        inputs, targets = batch
        inputs = inputs + torch.randn(len(inputs), FEATURES, generator=self.noise) / 10
        return super().loss(model, (inputs, targets))


class Noisy(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.torch_generator = torch.Generator().manual_seed(8)
        self.python_generator = random.Random(9)
        self.numpy_generator = numpy.random.default_rng(10)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.rand(x.shape, generator=self.torch_generator) > 0.2
        shift = torch.from_numpy(self.numpy_generator.normal(size=x.shape)).to(x.dtype) / 10
        return x * mask * self.python_generator.uniform(0.5, 1.5) + shift

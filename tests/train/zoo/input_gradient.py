"""An energy whose gradient by the input is part of the loss: forward calls autograd itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zoo.tasks import Stack, Vectors


class InputGradient(Vectors):
    def model(self) -> nn.Module:
        return Energy()

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        inputs, targets = batch
        found, force = model(inputs)
        return (found - targets).square().sum() + force.square().sum() / 10, len(inputs)


class Energy(Stack):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.first(x)
        inner = torch.tanh(hidden)
        [force] = torch.autograd.grad(inner.square().sum(), hidden, create_graph=True)
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(hidden), force

"""The loss calls the model twice: two passes with other dropout that should agree."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zoo.tasks import Residual, Stack, Vectors


class CalledTwice(Vectors):
    def model(self) -> nn.Module:
        return Stack(blocks=[Residual(16, dropout=0.2) for _ in range(3)])

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        inputs, targets = batch
        one, other = model(inputs), model(inputs)
        return (one - targets).square().sum() + (one - other).square().sum(), len(inputs)

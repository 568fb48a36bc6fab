"""A model whose weights are normalized by buffers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from launcher.train import Task


class Spectral(Task):
    def model(self) -> nn.Module:
        return nn.Sequential(spectral_norm(nn.Linear(16, 16)), nn.ReLU(), weight_norm(nn.Linear(16, 4)))

    def blocks(self, model: nn.Module) -> Any:
        return [model[0]]  # type: ignore[index]

    def data(self, split: str) -> Any:
        generator = torch.Generator().manual_seed(0)
        return torch.utils.data.TensorDataset(torch.randn(64, 16, generator=generator))

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        (x,) = batch
        return model(x).square().sum(), len(x)

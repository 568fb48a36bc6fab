"""Random state and buffers as they are when a step begins."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from launcher.train.rng import rng_state


class StartOfStep:
    """A copy of every buffer where it is, made without waiting for the device. Not only of those that torch
    counts as changed: BatchNorm's statistics change uncounted."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model.module if isinstance(model, DistributedDataParallel) else model
        self._device = device
        self.take()

    @torch.no_grad()
    def take(self) -> None:
        self.rng: dict[str, Any] = rng_state(self._device)
        self._buffers = {name: buffer.clone() for name, buffer in self._model.named_buffers()}

    def buffers(self) -> dict[str, torch.Tensor]:
        return self._buffers

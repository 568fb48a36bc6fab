"""A contrastive loss: the negatives are the other samples of the micro-batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from zoo.tasks import Stack, Vectors


class Contrastive(Vectors):
    def model(self) -> nn.Module:
        return Stack()

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        inputs, _ = batch
        one, other = model(torch.cat([inputs, inputs + torch.randn_like(inputs) / 10])).chunk(2)
        scores = functional.normalize(one, dim=1) @ functional.normalize(other, dim=1).T * 5
        return functional.cross_entropy(scores, torch.arange(len(inputs)), reduction="sum"), len(inputs)

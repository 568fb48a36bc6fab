"""A contrastive loss over all ranks: the task itself calls a collective in each loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from zoo.tasks import Stack, Vectors


class ContrastiveOverRanks(Vectors):
    def model(self) -> nn.Module:
        return Stack()

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        inputs, _ = batch
        one, other = model(torch.cat([inputs, inputs + torch.randn_like(inputs) / 10])).chunk(2)
        other = functional.normalize(other, dim=1)
        gathered = [torch.empty_like(other) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, other.detach())
        gathered[dist.get_rank()] = other
        scores = functional.normalize(one, dim=1) @ torch.cat(gathered).T * 5
        own = torch.arange(len(inputs)) + dist.get_rank() * len(inputs)
        return functional.cross_entropy(scores, own, reduction="sum"), len(inputs)

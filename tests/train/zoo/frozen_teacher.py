"""Mean teacher: forward moves frozen parameters towards the student through `.data`."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from zoo.tasks import Stack, Vectors

DECAY = 0.9


class MeanTeacher(Vectors):
    def model(self) -> nn.Module:
        return Pair()

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        inputs, targets = batch
        student, apart = model(inputs)
        return (student - targets).square().sum() + apart, len(inputs)


class Pair(Stack):
    """The teacher is in units of FSDP: between their calls it is there as shards, like the student."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.ModuleList(copy.deepcopy(block) for block in self.blocks).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.training:
            self.follow()
        start = self.first(x)
        student = teacher = start
        for block, followed in zip(self.blocks, self.teacher, strict=True):
            student = block(student)
            with torch.no_grad():
                teacher = followed(teacher)
        return self.last(student), (student - teacher).square().sum()

    def follow(self) -> None:
        for theirs, ours in zip(self.teacher.parameters(), self.blocks.parameters(), strict=True):
            theirs.data.mul_(DECAY).add_(ours.data, alpha=1 - DECAY)

"""A teacher in a plain list, so that the model does not count its parameters as its own; above 1 MiB."""

from __future__ import annotations

import copy

import torch
from torch import nn

from zoo.tasks import Stack, Vectors

WIDTH = 520
"Its square is above 1 MiB of fp32."


class HiddenTeacher(Vectors):
    def model(self) -> nn.Module:
        return Followed()


class Followed(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.ModuleList([nn.Sequential(nn.Linear(16, WIDTH), nn.Linear(WIDTH, WIDTH))])
        self.back = nn.Linear(WIDTH, 16)
        self.hidden_teacher = [copy.deepcopy(self.wide[0]).requires_grad_(False)]

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        student = self.wide[0](x)
        [teacher] = self.hidden_teacher
        with torch.no_grad():
            taught = teacher(x)
            if self.training:  # towards what the student said: FSDP has its weights elsewhere by now
                teacher[1].weight.data.add_((student - taught).mean(0), alpha=0.1)
        return x + self.back(student + (taught - student) / 10)

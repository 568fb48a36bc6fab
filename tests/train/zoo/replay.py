"""Containers in attributes: a deque of past activations, a dictionary of counts, a plain counter."""

from __future__ import annotations

from collections import deque

import torch
from torch import nn

from zoo.tasks import Stack, Vectors


class Replay(Vectors):
    def model(self) -> nn.Module:
        return Remembering()


class Remembering(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.past: deque[torch.Tensor] = deque(maxlen=3)
        self.seen = {"passes": 0, "samples": 0}
        self.passes = 0

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.passes += 1
            self.seen["passes"] += 1
            self.seen["samples"] += len(x)
            self.past.append(x.detach().mean(0))
        if self.past:
            x = x + sum(self.past) / len(self.past)
        return x / (1 + self.passes / 100)

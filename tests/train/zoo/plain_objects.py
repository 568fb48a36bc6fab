"""State in what is no tensor: an object of a class of the author's, an array of numpy, a set, a bytearray."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy
import torch
from torch import nn

from zoo.tasks import Stack, Vectors


@dataclass
class Statistics:
    count: int = 0
    mean: torch.Tensor = field(default_factory=lambda: torch.zeros(16))
    largest: list[float] = field(default_factory=list)


class PlainObjects(Vectors):
    def model(self) -> nn.Module:
        return Counting()


class Counting(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.statistics = Statistics()
        self.histogram = numpy.zeros(4)
        self.wide = {"sums": torch.zeros(2**14 + 64, 16)}
        self.sizes: set[int] = set()
        self.bits = bytearray(4)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            mean = x.detach().mean(0)
            self.statistics.count += 1
            self.statistics.mean.lerp_(mean, 0.1)
            self.statistics.largest.append(float(x.detach().abs().max()))
            self.histogram += numpy.bincount(x.detach().abs().sum(1).long().clamp(0, 3), minlength=4)
            self.wide["sums"].data[:4].add_(mean)
            self.sizes.add(len(x) * self.statistics.count)
            self.bits[self.statistics.count % 4] ^= 1
        scale = 1 + sum(self.statistics.largest) / 100 + float(self.histogram[1]) / 100 + sum(self.bits) / 10
        return (x - self.statistics.mean + self.wide["sums"][0] / 100) / scale + len(self.sizes) / 100

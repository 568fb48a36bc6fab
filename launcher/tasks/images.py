"""Image classification: a small convolutional network with BatchNorm on scikit-learn's digits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from launcher.tasks.digits import digits
from launcher.train.task import Split, Task

CLASSES = 10


class DigitClassifier(Task):
    """Classifies handwritten digits. The job must set `model: {batch_norm: true}`.

    `channels` lists the channels of the stages. Each stage halves the picture's side.
    """

    def __init__(self, channels: Sequence[int] = (32, 64)) -> None:
        self.channels = tuple(channels)

    def model(self) -> nn.Module:
        return ConvNet(self.channels)

    def data(self, split: Split) -> TensorDataset:
        pictures, labels = digits(split)
        return TensorDataset(pictures[:, None], labels)

    def loss(
        self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | float]:
        pictures, labels = batch
        return functional.cross_entropy(model(pictures).float(), labels, reduction="sum"), len(labels)


class ConvNet(nn.Module):
    """(n, 1, height, width) -> logits (n, CLASSES)."""

    def __init__(self, channels: Sequence[int]) -> None:
        super().__init__()
        widths = [1, *channels]
        self.stages = nn.ModuleList(Stage(*pair) for pair in pairwise(widths))
        self.head = nn.Linear(widths[-1], CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean(dim=(-2, -1)))  # type: ignore[no-any-return]


class Stage(nn.Module):
    """(n, inputs, height, width) -> (n, outputs, height / 2, width / 2)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.max_pool2d(functional.relu(self.norm(self.conv(x))), kernel_size=2)

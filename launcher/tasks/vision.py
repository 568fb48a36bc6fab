"""A small vision transformer (arXiv 2010.11929) that turns each picture into a few tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from launcher.tasks.gpt import Block


@dataclass(frozen=True)
class VisionShape:
    side: int
    "Side of the square picture, in pixels."
    patch: int
    "Side of a patch, in pixels."
    dim: int
    layers: int
    heads: int
    pooled: int
    "The patches are averaged to pooled x pooled tokens."


class VisionEncoder(nn.Module):
    """Pictures (n, 3, side, side) from 0 to 1 -> (n, tokens, dim)."""

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.pooled, grid = shape.pooled, shape.side // shape.patch
        self.patches = nn.Conv2d(3, shape.dim, kernel_size=shape.patch, stride=shape.patch)
        self.positions = nn.Parameter(torch.zeros(grid**2, shape.dim))
        self.blocks = nn.ModuleList(
            Block(shape.dim, shape.heads, bias=True, causal=False) for _ in range(shape.layers)
        )
        self.norm = nn.LayerNorm(shape.dim)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        grid = self.patches(pictures)
        x = grid.flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        rows = self.norm(x).transpose(1, 2).unflatten(2, grid.shape[-2:])
        return functional.adaptive_avg_pool2d(rows, self.pooled).flatten(2).transpose(1, 2)

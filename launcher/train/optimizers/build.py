"""The optimizer that a recipe asks for."""

from __future__ import annotations

import torch
from torch import nn

from launcher.spec.job import Training
from launcher.spec.recipe import Recipe
from launcher.train.optimizers.table import row_of


def build_optimizer(model: nn.Module, recipe: Recipe, training: Training) -> torch.optim.Optimizer:
    """Matrices decay; gains, biases and norms do not. Raises SetupError when a library is missing."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    others = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": training.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return row_of(recipe).make([group for group in groups if group["params"]], model, training.lr)

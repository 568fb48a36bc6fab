"""Learning rate, and the one division and clipping of the gradients."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from launcher.spec.job import Training

FLOOR = 0.1  # of the peak learning rate, reached at the last step


def learning_rate(step: int, steps: int, training: Training) -> float:
    """Of the `step`-th of `steps` steps, counted from 1: linear warm-up, then cosine to a tenth.

    A pure function of the step: there is no scheduler state to save.
    """
    if step <= training.warmup_steps:
        return training.lr * step / training.warmup_steps
    progress = (step - training.warmup_steps) / max(1, steps - training.warmup_steps)
    return training.lr * (FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * min(1.0, progress))) / 2)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def divide_and_clip(model: nn.Module, factor: float, clip_norm: float | None) -> float:
    """Multiply all gradients by `factor`, then clip them to `clip_norm`, in one pass over memory.

    Returns the norm of the whole gradient before clipping. It is taken over all shards of all ranks,
    so it does not depend on the sharding.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    norm_after = float(norm) * factor
    if clip_norm is not None and norm_after > clip_norm:
        factor *= clip_norm / norm_after
    torch._foreach_mul_(gradients, factor)
    return norm_after

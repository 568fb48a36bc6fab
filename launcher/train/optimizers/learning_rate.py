"""The learning rate of each step."""

from __future__ import annotations

import math

import torch

from launcher.spec.job import Training

FLOOR = 0.1  # the last step's learning rate, as a part of the peak


def learning_rate(step: int, steps: int, training: Training) -> float:
    """Return the learning rate of `step`, counted from 1: linear warm-up, then cosine decay to a tenth.

    It is a pure function of the step, so there is no scheduler state to save.
    """
    if step <= training.warmup_steps:
        return training.lr * step / training.warmup_steps
    progress = (step - training.warmup_steps) / max(1, steps - training.warmup_steps)
    return training.lr * (FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * min(1.0, progress))) / 2)


def set_learning_rate(optimizer: torch.optim.Optimizer, step: int, steps: int, training: Training) -> float:
    """Set the learning rate of `step`, and return it."""
    lr = learning_rate(step, steps, training)
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr

"""The learning rate, and the division and clipping of gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor

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


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def divide_and_clip(
    gradients: list[torch.Tensor],
    factor: float,
    clip_norm: float | None,
    over_stages: Callable[[float], float] | None = None,
) -> float:
    """Multiply all gradients by `factor`, then clip them to `clip_norm`, in one pass over memory.

    Returns the norm of the whole gradient before clipping, over all shards of all ranks: it does not depend
    on the sharding. `over_stages` adds up a number over the stages of a pipeline.
    """
    norm = torch.nn.utils.get_total_norm(gradients)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    norm_after = float(norm) * factor
    if over_stages is not None:
        norm_after = math.sqrt(over_stages(norm_after**2))
    if clip_norm is not None and norm_after > clip_norm:
        factor *= clip_norm / norm_after
    torch._foreach_mul_(gradients, factor)
    return norm_after

"""DistributedDataParallel, and the model in it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from launcher.train.task import TaskError


class DDP(DistributedDataParallel):
    """DDP that has the model's plain attributes, so that a task can read them under any sharding."""

    _forwards = 0
    "Number of forward passes with gradients. DDP reduces those of these passes alone."

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        self._forwards += torch.is_grad_enabled()
        return super().forward(*inputs, **keywords)  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("module", "__setstate__") or not hasattr(self.module, name):
                raise
        value = getattr(self.module, name)
        if isinstance(value, nn.Module | nn.Parameter):
            raise TaskError(
                f"the task uses {name} of the model by itself: under DDP only model(...) may be called, "
                "which reduces the gradients. Use it in the model's forward"
            )
        return value


def forwards(model: nn.Module) -> int | None:
    """Return how often DDP's forward has run with gradients; None for a model that is not in DDP."""
    return model._forwards if isinstance(model, DDP) else None


def without_ddp(model: nn.Module) -> nn.Module:
    """Return the task's own model, which DDP wraps."""
    whole: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    return whole

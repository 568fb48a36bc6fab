"""DistributedDataParallel, and the model in it."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from launcher.train.task import TaskError


class DDP(DistributedDataParallel):
    """DDP that has the model's plain attributes, so that a task can read them under any sharding."""

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


def without_ddp(model: nn.Module) -> nn.Module:
    """Return the task's own model, which DDP wraps."""
    whole: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    return whole

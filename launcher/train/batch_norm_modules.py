"""BatchNorm modules of a model: found, computed in fp32, and used without a change of their statistics.

That a micro-batch keeps two samples is a rule in launcher.spec.recipe_rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm


def first_batch_norm(model: nn.Module) -> str | None:
    """Return the name of the first BatchNorm that uses only its rank's micro-batch, or None."""
    for name, module in model.named_modules():
        # SyncBatchNorm uses the samples of all ranks.
        if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
            return str(name)
    return None


def compute_in_fp32(model: nn.Module) -> None:
    """Make every BatchNorm of the model keep its statistics and compute in fp32, in any precision.

    torch's BatchNorm needs matching types of input, weight and statistics, which FSDP's mixed precision does
    not provide; and statistics in bf16 miss small changes. State dicts are unchanged.
    """
    for norm in model.modules():
        if isinstance(norm, _BatchNorm) and not isinstance(norm, nn.SyncBatchNorm):
            for name in ("running_mean", "running_var"):
                if (statistics := getattr(norm, name)) is not None:
                    setattr(norm, name, statistics.float())
            norm.forward = partial(_forward, norm)  # type: ignore[method-assign]


def _forward(norm: _BatchNorm, x: torch.Tensor) -> torch.Tensor:
    """Do what _BatchNorm.forward does, in fp32."""
    norm._check_input_dim(x)  # type: ignore[no-untyped-call]
    updates_statistics = norm.training and norm.track_running_stats
    momentum = norm.momentum
    if updates_statistics and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if momentum is None:
            momentum = 1.0 / float(norm.num_batches_tracked)
    uses_statistics = updates_statistics or not norm.training
    y = functional.batch_norm(
        x.float(),
        norm.running_mean if uses_statistics else None,
        norm.running_var if uses_statistics else None,
        norm.weight.float() if norm.affine else None,
        norm.bias.float() if norm.affine else None,
        norm.training or norm.running_mean is None,
        momentum or 0.0,
        norm.eps,
    )
    return y.to(x.dtype)


@contextmanager
def batch_norms_in_evaluation(module: nn.Module) -> Iterator[None]:
    """Make BatchNorms use their running statistics without updating them."""
    norms = [m for m in module.modules() if isinstance(m, _BatchNorm) and m.training]
    for norm in norms:
        norm.training = False
    try:
        yield
    finally:
        for norm in norms:
            norm.training = True

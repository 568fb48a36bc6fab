"""Precision: in which type parameters are stored, computed and reduced."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from launcher.spec.recipe import SHARDED, Recipe

# What is computed in, where parameters stay in fp32.
# float8 is bf16-mixed but for the matrix products inside the blocks.
COMPUTE = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16, "float8": torch.bfloat16}


def cast(model: nn.Module, recipe: Recipe) -> nn.Module:
    """bf16 stores everything in bf16; the others keep fp32 parameters."""
    return model.to(torch.bfloat16) if recipe.precision == "bf16" else model


def mixed_precision(recipe: Recipe, *, root: bool) -> MixedPrecisionPolicy:
    """FSDP2's policy: fp32 shards, 16-bit compute, gradients added up over the ranks in fp32.

    The root returns fp32, so that a task computes its loss in fp32 without a thought.
    """
    if recipe.precision not in COMPUTE:
        return MixedPrecisionPolicy(output_dtype=torch.float32 if root else None)
    return MixedPrecisionPolicy(
        param_dtype=COMPUTE[recipe.precision],
        reduce_dtype=torch.float32,
        output_dtype=torch.float32 if root else None,
    )


def compute_in(recipe: Recipe, device: torch.device) -> AbstractContextManager[object]:
    """Around the forward pass: autocast where no FSDP policy does the same."""
    if recipe.precision in COMPUTE and recipe.sharding not in SHARDED:
        return torch.autocast(device.type, dtype=COMPUTE[recipe.precision])
    return nullcontext()

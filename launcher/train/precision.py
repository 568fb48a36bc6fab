"""Precision: in which type parameters are stored, computed and reduced."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_map_only

from launcher.spec.recipe import SHARDED, Recipe
from launcher.train.batch_norm import computes_in_fp32

# What is computed in, where parameters stay in fp32.
# float8 is bf16-mixed but for the matrix products inside the blocks.
COMPUTE = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16, "float8": torch.bfloat16}


def cast(model: nn.Module, recipe: Recipe) -> nn.Module:
    """bf16 stores everything in bf16, but BatchNorm's statistics; the others keep fp32 parameters."""
    if recipe.precision == "bf16":
        model = model.to(torch.bfloat16)
    if recipe.precision != "fp32":
        computes_in_fp32(model)
    return model


def outwardly_fp32(model: nn.Module, recipe: Recipe) -> nn.Module:
    """The same model, which returns fp32 whatever it computes in: a task computes its loss in fp32 without
    a thought. With `bf16` it takes fp32, too: a task's data need not know the type of the parameters."""
    if recipe.precision == "bf16":
        model.register_forward_pre_hook(_inputs_in_bf16, with_kwargs=True)
    if recipe.precision != "fp32":
        model.register_forward_hook(lambda _, __, outputs: _floats_to(torch.float32, outputs))
    return model


def _inputs_in_bf16(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return _floats_to(torch.bfloat16, args), _floats_to(torch.bfloat16, kwargs)


def _floats_to(dtype: torch.dtype, tree: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tree)


def mixed_precision(recipe: Recipe) -> MixedPrecisionPolicy:
    """FSDP2's policy: fp32 shards, 16-bit compute, gradients added up over the ranks in fp32."""
    if recipe.precision not in COMPUTE:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=COMPUTE[recipe.precision], reduce_dtype=torch.float32)


def compute_in(recipe: Recipe, device: torch.device) -> AbstractContextManager[object]:
    """Around the forward pass: autocast where no FSDP policy does the same."""
    if recipe.precision in COMPUTE and recipe.sharding not in SHARDED:
        return torch.autocast(device.type, dtype=COMPUTE[recipe.precision])
    return nullcontext()

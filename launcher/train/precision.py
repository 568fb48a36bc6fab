"""Precision: the types in which parameters are stored and computed, and gradients are reduced."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils._pytree import tree_map_only

from launcher.spec.recipe import SHARDED, Recipe
from launcher.train.batch_norm_modules import compute_in_fp32

# The compute type of precisions with fp32 parameters.
# float8 equals bf16-mixed except for the matrix products inside the blocks.
COMPUTE = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16, "float8": torch.bfloat16}


def cast(model: nn.Module, recipe: Recipe) -> nn.Module:
    """Return the model with parameters and buffers of floats in bf16 if the precision is `bf16`; other
    precisions keep them. BatchNorm's statistics stay in fp32.
    """
    if recipe.precision == "bf16":
        # Not `.to`, which also casts complex tensors and throws their imaginary part away.
        model = model._apply(  # type: ignore[no-untyped-call]
            lambda t: t.to(torch.bfloat16) if t.is_floating_point() else t
        )
    if recipe.precision != "fp32":
        compute_in_fp32(model)
    return model


def compute_type(recipe: Recipe) -> torch.dtype:
    """Return the type of matrix products outside float8 layers."""
    if recipe.precision == "bf16":
        return torch.bfloat16
    return COMPUTE.get(recipe.precision, torch.float32)


def with_fp32_outputs(model: nn.Module, recipe: Recipe) -> nn.Module:
    """Make the model return fp32 in any precision, so that a task computes its loss in fp32.

    With `bf16` the model also accepts fp32 inputs, so a task's data are independent of the parameter type. A
    model in stages is never called: launcher.train.pipeline.cut applies `inputs` to the batch, and stages
    return activations in the type in which they compute.
    """
    if recipe.precision == "fp32" or recipe.pipeline > 1:
        return model
    if recipe.precision == "bf16":
        model.register_forward_pre_hook(
            lambda _, args, kwargs: (inputs(recipe, args), inputs(recipe, kwargs)), with_kwargs=True
        )
    model.register_forward_hook(lambda _, __, outputs: _floats_to(torch.float32, outputs))
    return model


def inputs(recipe: Recipe, tree: Any) -> Any:
    """Return what a model is called with: with `bf16`, its tensors of floats in bf16.

    With other precisions autocast and FSDP cast the inputs of layers.
    """
    return _floats_to(torch.bfloat16, tree) if recipe.precision == "bf16" else tree


def _floats_to(dtype: torch.dtype, tree: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tree)


def mixed_precision(recipe: Recipe, *, cast_inputs: bool = True) -> MixedPrecisionPolicy:
    """Return FSDP2's policy: fp32 shards, 16-bit compute, gradients reduced in fp32."""
    if recipe.precision not in COMPUTE:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(COMPUTE[recipe.precision], torch.float32, cast_forward_inputs=cast_inputs)


def cast_inputs_of_layers(layers: Iterable[nn.Module], recipe: Recipe) -> None:
    """Let each layer cast its inputs to the type in which it computes, as autocast does, so that what a model
    computes from its own inputs stays exact: FSDP would round the model's inputs."""
    if recipe.precision not in COMPUTE:
        return
    to_compute = partial(_floats_to, COMPUTE[recipe.precision])
    for layer in layers:
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: (to_compute(args), to_compute(kwargs)), with_kwargs=True
        )


def parametrize_in_fp32(model: nn.Module, recipe: Recipe) -> None:
    """Let parametrizations with buffers, such as spectral_norm, compute in fp32: FSDP casts the weights that
    they change, but not their buffers."""
    if recipe.precision not in COMPUTE:
        return
    for parametrizations in [m for m in model.modules() if isinstance(m, ParametrizationList)]:
        for one in parametrizations:
            has_buffers = any(buffer.is_floating_point() for buffer in one.buffers())
            if has_buffers and not any(True for _ in one.parameters()):
                one.register_forward_pre_hook(lambda _, args: _floats_to(torch.float32, args))
                one.register_forward_hook(lambda _, __, out: _floats_to(COMPUTE[recipe.precision], out))


def rounded_buffers(model: nn.Module) -> list[str]:
    """Return the names of buffers whose values bf16 changes. Buffers on the meta device have no values."""
    return [
        name
        for name, buffer in model.named_buffers()
        if buffer.is_floating_point() and not buffer.is_meta
        if not ((buffer.to(torch.bfloat16) == buffer) | buffer.isnan()).all()
    ]


def compute_in(recipe: Recipe, device: torch.device) -> AbstractContextManager[object]:
    """Return a context for the forward pass: autocast, unless FSDP's policy already casts."""
    if recipe.precision in COMPUTE and recipe.sharding not in SHARDED:
        return torch.autocast(device.type, dtype=COMPUTE[recipe.precision])
    return nullcontext()

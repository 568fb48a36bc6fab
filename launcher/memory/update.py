"""Temporaries of the optimizer's update: one parameter's at a time."""

from __future__ import annotations

from typing import Literal

from launcher.memory.shapes import ModelShapes, Parameter
from launcher.memory.states import Ranks, Shard, in_eight_bits, shard_of
from launcher.spec.recipe import Recipe

FP32, BF16, INT32 = 4, 2, 4


def update_temporaries(
    model: ModelShapes, recipe: Recipe, ranks: Ranks, like: Literal["cuda", "cpu"]
) -> tuple[int, str]:
    """The most bytes at a time on rank 0's device, and the parameter whose they are. An optimizer on the
    host has its temporaries there."""
    if recipe.offload != "none":
        return 0, ""
    shards = ranks.shards(recipe)
    sizes = [(_bytes(recipe, p, shard_of(p, shards, 0), like), p.name) for p in model.trained]
    return max(sizes, default=(0, ""))


def _bytes(recipe: Recipe, p: Parameter, shard: Shard, like: Literal["cuda", "cpu"]) -> int:
    """As launcher.train.optimizers computes."""
    widened = 0 if p.itemsize == FP32 else FP32
    match recipe.optimizer:
        case "adamw":  # one fused kernel
            return 0
        case "lion":  # the direction
            return shard.numel * p.itemsize
        case "adam-mini":  # the gradient in fp32 and its square
            return shard.numel * (widened + FP32)
        case "adamw-bf16":  # the gradient, both moments in fp32, noise, and the rounded second one
            return shard.numel * (widened + FP32 + FP32 + INT32 + BF16)
        case "adamw-8bit" | "paged-adamw-8bit" | "lion-8bit":
            return 0 if like == "cuda" else shard.numel * _on_the_cpu(recipe, p)


def _on_the_cpu(recipe: Recipe, p: Parameter) -> int:
    """bitsandbytes 0.50's kernels for CPUs are torch operators; for CUDA they have no temporaries."""
    moments = 1 if recipe.optimizer == "lion-8bit" else 2
    return FP32 * (2 + 2 * moments) if in_eight_bits(p) else FP32 * (1 + moments)

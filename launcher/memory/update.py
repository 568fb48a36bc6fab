"""Temporaries of the optimizer's update: one parameter's at a time."""

from __future__ import annotations

from launcher.memory.shapes import ModelShapes, Parameter
from launcher.memory.states import Ranks, Shard, shard_of
from launcher.spec.recipe import Recipe

FP32, BF16, INT32 = 4, 2, 4


def update_temporaries(model: ModelShapes, recipe: Recipe, ranks: Ranks) -> tuple[int, str]:
    """The most bytes at a time on rank 0's device, and the parameter whose they are. An optimizer on the
    host has its temporaries there."""
    if recipe.offload != "none":
        return 0, ""
    shards = ranks.shards(recipe)
    sizes = [
        (_bytes(recipe, p, shard_of(p, shards, 0)), p.name) for p, _ in model.distinct if p.requires_grad
    ]
    return max(sizes, default=(0, ""))


def _bytes(recipe: Recipe, p: Parameter, shard: Shard) -> int:
    """As launcher.train.optimizers computes."""
    widened = 0 if p.itemsize == FP32 else FP32
    match recipe.optimizer:
        case "adamw" | "adamw-8bit" | "paged-adamw-8bit" | "lion-8bit":  # one fused kernel
            return 0
        case "lion":  # the direction
            return shard.numel * p.itemsize
        case "adam-mini":  # the gradient in fp32 and its square, or a vector's square, root and update
            return shard.numel * (3 * FP32 if p.vector else widened + FP32)
        case "adamw-bf16":  # the gradient, both moments in fp32, noise, and the rounded second one
            return shard.numel * (widened + FP32 + FP32 + INT32 + BF16)

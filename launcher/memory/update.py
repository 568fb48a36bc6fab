"""Temporaries of the optimizer's update, which handles one parameter at a time."""

from __future__ import annotations

from launcher.memory.shapes import ModelShapes, Parameter
from launcher.memory.states import Ranks, Shard, shard_of
from launcher.spec.optimizers import OPTIMIZERS
from launcher.spec.recipe import Recipe


def update_temporaries(model: ModelShapes, recipe: Recipe, ranks: Ranks) -> tuple[int, str]:
    """Return the peak bytes of temporaries on rank 0's device, and the parameter that needs them.

    An optimizer on the host has its temporaries there, so the result is (0, "").
    """
    if recipe.offload != "none":
        return 0, ""
    shards = ranks.shards(recipe)
    sizes = [
        (temporaries_of(recipe, p, shard_of(p, shards, 0)), p.name)
        for p, _ in model.distinct
        if p.requires_grad
    ]
    return max(sizes, default=(0, ""))


def temporaries_of(recipe: Recipe, p: Parameter, shard: Shard) -> int:
    """Return the peak bytes of temporaries while this shard is updated on the device."""
    each = OPTIMIZERS[recipe.optimizer].temporaries
    return shard.numel * each(p.itemsize, p.vector) if each is not None else 0

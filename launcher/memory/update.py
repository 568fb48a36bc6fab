"""Temporaries of the optimizer's update: one parameter's at a time."""

from __future__ import annotations

from launcher.memory.shapes import ModelShapes
from launcher.memory.states import Ranks, shard_of
from launcher.spec.optimizers import OPTIMIZERS
from launcher.spec.recipe import Recipe


def update_temporaries(model: ModelShapes, recipe: Recipe, ranks: Ranks) -> tuple[int, str]:
    """The most bytes at a time on rank 0's device, and the parameter whose they are. An optimizer on the
    host has its temporaries there."""
    each = OPTIMIZERS[recipe.optimizer].temporaries
    if recipe.offload != "none":
        return 0, ""
    shards = ranks.shards(recipe)
    sizes = [
        (shard_of(p, shards, 0).numel * each(p.itemsize, p.vector) if each is not None else 0, p.name)
        for p, _ in model.distinct
        if p.requires_grad
    ]
    return max(sizes, default=(0, ""))

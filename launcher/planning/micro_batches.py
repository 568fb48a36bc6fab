"""Smaller micro-batches at the same global batch, for a run whose model is unknown."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from launcher.spec.mesh import grad_sync_applies
from launcher.spec.recipe import SHARDED, Recipe
from launcher.spec.recipe_rules import Setting, broken_rules

WITHIN_A_RUN = frozenset({"micro_batch_size", "grad_accum", "grad_sync", "loss_chunks"})
"Fields that the training loop can change between two steps, since nothing is built from them."


def ladder(recipe: Recipe, setting: Setting) -> tuple[Recipe, ...]:
    """Return every rung below `recipe` that needs no estimate, the next one first."""
    rungs: list[Recipe] = []
    below = one_lower(recipe, setting)
    while below is not None:
        rungs.append(below)
        below = one_lower(below, setting)
    return tuple(rungs)


def with_sizes_between(recipe: Recipe, rungs: Sequence[Recipe]) -> tuple[Recipe, ...]:
    """Return `recipe` and its `rungs`, with every divisor of the batch between their micro-batches."""
    recipes = [recipe]
    for rung in rungs:
        low, high = rung.micro_batch_size, recipes[-1].micro_batch_size
        sizes = [size for size in reversed(divisors(_per_rank(rung))) if low < size < high]
        recipes += [with_micro_batch(rung, size) for size in sizes]
        recipes.append(rung)
    return tuple(recipes)


def with_micro_batch(recipe: Recipe, size: int) -> Recipe:
    """Return the recipe with micro-batches of `size`, which must divide the samples of each rank."""
    return recipe.model_copy(update={"micro_batch_size": size, "grad_accum": _per_rank(recipe) // size})


@functools.lru_cache
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors in ascending order."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*low, *(number // n for n in low)}))


def _per_rank(recipe: Recipe) -> int:
    return recipe.micro_batch_size * recipe.grad_accum


def one_lower(recipe: Recipe, setting: Setting) -> Recipe | None:
    """Return the next rung of `ladder`; None at its end.

    `grad_sync: last` is given up before the micro-batch in two cases: under FSDP, where more micro-batches
    would keep whole gradients, and if the micro-batch is lowered last. Otherwise DDP gives it up at the end:
    it costs one more copy of the gradients and saves much traffic.
    """
    smaller = smaller_micro_batch(recipe, setting)
    if not setting.entrypoint or recipe.grad_sync == "each" or not grad_sync_applies(recipe):
        return smaller
    each = recipe.model_copy(update={"grad_sync": "each"})
    if recipe.sharding in SHARDED or setting.keeps_micro_batch:
        return each if recipe.grad_accum > 1 else smaller_micro_batch(each, setting)
    return each if smaller is None and recipe.grad_accum > 1 else smaller


def accumulating_instead(recipe: Recipe, setting: Setting) -> Recipe | None:
    """Return a smaller micro-batch in place of `optimizer_step: backward`, which excludes accumulation.

    The gradients that then stay may need more memory than the smaller activations save. None for a recipe
    that steps after the backward pass, and if the micro-batch cannot be lowered.
    """
    if recipe.optimizer_step != "backward":
        return None
    return smaller_micro_batch(recipe.model_copy(update={"optimizer_step": "after"}), setting)


def smaller_micro_batch(recipe: Recipe, setting: Setting) -> Recipe | None:
    """Halve the micro-batch, or take the largest valid divisor below; micro-batch x accumulation stays exact.

    If all of these are too small, take the smallest valid divisor above the half. Returns None if the
    micro-batch cannot be lowered.
    """
    if setting.why_micro_batch_stays is not None:
        return None
    half = recipe.micro_batch_size // 2
    sizes = [size for size in divisors(_per_rank(recipe)) if size < recipe.micro_batch_size]
    for size in sorted(sizes, key=lambda size: (size > half, abs(half - size))):
        smaller = with_micro_batch(recipe, size)
        if not broken_rules(smaller, setting):
            return smaller
    return None

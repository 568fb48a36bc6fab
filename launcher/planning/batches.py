"""Smaller micro-batches at the same global batch: what a run can go down to without knowing its model."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.spec.recipe import SHARDED, Recipe
from launcher.spec.rules import Setting, broken_rules

WITHIN_A_RUN = frozenset({"micro_batch_size", "grad_accum", "grad_sync", "loss_chunks"})
"Fields that the training loop can change between two steps: nothing is built after them."


def ladder(recipe: Recipe, setting: Setting) -> tuple[Recipe, ...]:
    """Every rung below `recipe` that can be told without an estimate, the next one first."""
    rungs: list[Recipe] = []
    below = one_lower(recipe, setting)
    while below is not None:
        rungs.append(below)
        below = one_lower(below, setting)
    return tuple(rungs)


def finely(recipe: Recipe, rungs: Sequence[Recipe]) -> tuple[Recipe, ...]:
    """`recipe` and the `rungs` below it, with every divisor of the batch between their micro-batches."""
    found = [recipe]
    for rung in rungs:
        sizes = range(found[-1].micro_batch_size - 1, rung.micro_batch_size, -1)
        found += [with_micro_batch(rung, size) for size in sizes if _per_rank(rung) % size == 0]
        found.append(rung)
    return tuple(found)


def with_micro_batch(recipe: Recipe, size: int) -> Recipe:
    """The same samples of each rank in micro-batches of `size`, a divisor of their number."""
    return recipe.model_copy(update={"micro_batch_size": size, "grad_accum": _per_rank(recipe) // size})


def _per_rank(recipe: Recipe) -> int:
    return recipe.micro_batch_size * recipe.grad_accum


def one_lower(recipe: Recipe, setting: Setting) -> Recipe | None:
    """The next rung of `ladder`; None at its end.

    `grad_sync: last` is given up before the micro-batch under FSDP, where more micro-batches would bring
    whole gradients, and where the micro-batch is to be kept. Otherwise DDP gives it up at the end: it costs
    one more copy of the gradients and saves much traffic.
    """
    smaller = smaller_micro_batch(recipe, setting)
    if not setting.entrypoint or recipe.grad_sync == "each" or recipe.sharding == "none":
        return smaller
    each = recipe.model_copy(update={"grad_sync": "each"})
    if recipe.sharding in SHARDED or setting.keeps_micro_batch:
        return each if recipe.grad_accum > 1 else smaller_micro_batch(each, setting)
    return each if smaller is None and recipe.grad_accum > 1 else smaller


def smaller_micro_batch(recipe: Recipe, setting: Setting) -> Recipe | None:
    """Half the micro-batch, or the largest valid divisor below; micro-batch x accumulation stays exact.

    Where all of those are too small, the smallest valid one above them. None where it may not be lowered.
    """
    if setting.micro_batch_stays is not None:
        return None
    half = recipe.micro_batch_size // 2
    for size in (*range(half, 0, -1), *range(half + 1, recipe.micro_batch_size)):
        if _per_rank(recipe) % size == 0:
            smaller = with_micro_batch(recipe, size)
            if not broken_rules(smaller, setting):
                return smaller
    return None

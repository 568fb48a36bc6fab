"""Smaller micro-batches at the same global batch: what a run can go down to without knowing its model."""

from __future__ import annotations

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


def micro_batches(recipe: Recipe, setting: Setting) -> tuple[Recipe, ...]:
    """`recipe` and what takes less with fewer samples at once, in falling order: every divisor."""
    found = [recipe]
    if recipe.sharding in SHARDED and setting.entrypoint and recipe.grad_sync == "last":
        recipe = recipe.model_copy(update={"grad_sync": "each"})
        if recipe.grad_accum > 1:
            found.append(recipe)
    sizes = range(recipe.micro_batch_size - 1, 0, -1)
    smaller = (with_micro_batch(recipe, size) for size in sizes if _per_rank(recipe) % size == 0)
    return (*found, *(one for one in smaller if not broken_rules(one, setting)))


def with_micro_batch(recipe: Recipe, size: int) -> Recipe:
    """The same samples of each rank in micro-batches of `size`, a divisor of their number."""
    return recipe.model_copy(update={"micro_batch_size": size, "grad_accum": _per_rank(recipe) // size})


def _per_rank(recipe: Recipe) -> int:
    return recipe.micro_batch_size * recipe.grad_accum


def one_lower(recipe: Recipe, setting: Setting) -> Recipe | None:
    """The next of the ladder; None at its end.

    Under FSDP `grad_sync: last` is given up before: more micro-batches would bring whole gradients. Under
    DDP, where it is one copy of the gradients more but much less traffic, it is given up last.
    """
    if not setting.entrypoint or recipe.grad_sync == "each":
        return smaller_micro_batch(recipe, setting)
    each = recipe.model_copy(update={"grad_sync": "each"})
    if recipe.sharding in SHARDED:
        return each if recipe.grad_accum > 1 else smaller_micro_batch(each, setting)
    smaller = smaller_micro_batch(recipe, setting)
    return each if smaller is None and recipe.sharding == "ddp" and recipe.grad_accum > 1 else smaller


def smaller_micro_batch(recipe: Recipe, setting: Setting) -> Recipe | None:
    """Half the micro-batch, or the largest divisor below: micro-batch x accumulation stays exact."""
    for size in range(recipe.micro_batch_size // 2, 0, -1):
        if _per_rank(recipe) % size == 0:
            smaller = with_micro_batch(recipe, size)
            return None if broken_rules(smaller, setting) else smaller
    return None

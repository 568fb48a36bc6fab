"""What to try when memory ran out: the next rung, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.spec.recipe import SHARDED, Recipe
from launcher.spec.rules import Setting, broken_rules
from launcher.spec.verdict import Verdict


@dataclass(frozen=True)
class Rung:
    """`recipe` is None at the bottom of the ladder."""

    recipe: Recipe | None
    reason: str


def ladder(recipe: Recipe, setting: Setting) -> tuple[Recipe, ...]:
    """Every rung below `recipe`, the next one first."""
    rungs: list[Recipe] = []
    below = _next(recipe, setting)
    while below is not None:
        rungs.append(below)
        below = _next(below, setting)
    return tuple(rungs)


def lower(recipe: Recipe, verdict: Verdict, setting: Setting) -> Rung:
    """The rung that fits the failure.

    A smaller micro-batch shrinks activations only. An optimizer that does not fit, or a full host
    while the activations are on a GPU, would meet the same end again, more slowly.
    """
    if verdict.phase == "optimizer":
        return Rung(
            None, "memory ran out in the optimizer step, where a smaller micro-batch does not help: "
            "shard over more ranks, or choose an 8-bit optimizer or offload"
        )  # fmt: skip
    if verdict.failure == "host-oom" and setting.gpus_per_node > 0:
        return Rung(
            None, "host memory ran out, which a smaller micro-batch on the GPU does not help: "
            "ask for more memory_per_node, fewer DataLoader workers, or less offload"
        )  # fmt: skip
    smaller = _next(recipe, setting)
    if smaller is None:
        least = 2 if setting.batch_norm else 1
        return Rung(None, f"the micro-batch is {recipe.micro_batch_size} already, the least here is {least}")
    if smaller.micro_batch_size == recipe.micro_batch_size:
        return Rung(
            smaller, "grad_sync last -> each: no rank keeps whole gradients until the last micro-batch"
        )
    return Rung(
        smaller,
        f"micro-batch {recipe.micro_batch_size} -> {smaller.micro_batch_size}, accumulation "
        f"{recipe.grad_accum} -> {smaller.grad_accum}; the global batch stays "
        f"{recipe.micro_batch_size * recipe.grad_accum * setting.ranks}",
    )


def _next(recipe: Recipe, setting: Setting) -> Recipe | None:
    """Smaller micro-batches, until there are none.

    Under FSDP `grad_sync: last` is given up before: more micro-batches would bring whole gradients. Under
    DDP, where it is one copy of the gradients more but much less traffic, it is given up last.
    """
    if not setting.entrypoint or recipe.grad_sync == "each":
        return _smaller_micro_batch(recipe, setting)
    each = recipe.model_copy(update={"grad_sync": "each"})
    if recipe.sharding in SHARDED:
        return each if recipe.grad_accum > 1 else _smaller_micro_batch(each, setting)
    smaller = _smaller_micro_batch(recipe, setting)
    return each if smaller is None and recipe.sharding == "ddp" and recipe.grad_accum > 1 else smaller


def _smaller_micro_batch(recipe: Recipe, setting: Setting) -> Recipe | None:
    """Half the micro-batch, or the largest divisor below: micro-batch x accumulation stays exact."""
    per_rank = recipe.micro_batch_size * recipe.grad_accum
    for micro in range(recipe.micro_batch_size // 2, 0, -1):
        if per_rank % micro == 0:
            smaller = recipe.model_copy(update={"micro_batch_size": micro, "grad_accum": per_rank // micro})
            return None if broken_rules(smaller, setting) else smaller
    return None

"""What to try when memory ran out: the next rung, or why there is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.planning.batches import WITHIN_A_RUN, one_lower, with_micro_batch
from launcher.spec.recipe import SHARDED, Recipe
from launcher.spec.rules import Setting, as_yaml, broken_rules
from launcher.spec.verdict import Verdict

STATES_ALONE = frozenset({"init", "optimizer", "checkpoint"})
"""Phases with no activations, that of loading a checkpoint included: what does not fit are parameters and
optimizer states, whatever the micro-batch."""

_BATCH = ("micro_batch_size", "grad_accum", "grad_sync")


@dataclass(frozen=True)
class Lowered:
    """`recipe` is None at the bottom of the ladder."""

    recipe: Recipe | None
    reason: str


def lower(recipe: Recipe, verdict: Verdict, setting: Setting, planned: Sequence[Recipe] = ()) -> Lowered:
    """The rung that fits the failure: of `planned` (the plan's recipe and its ladder), else a smaller
    micro-batch.

    A smaller micro-batch shrinks activations only. States that do not fit, or a full host while the
    activations are on a GPU, would meet the same end again, more slowly. In the probe every micro-batch has
    been tried: it finds the largest again under whatever else changes.
    """
    in_vain = verdict.phase in STATES_ALONE or verdict.phase == "probe"
    for rung in _below(recipe, planned, tried=in_vain):
        if in_vain:
            rung = rung.model_copy(update={name: getattr(recipe, name) for name in _BATCH})
        if _helps(rung, recipe, verdict, setting) and not broken_rules(rung, setting):
            return Lowered(rung, words_of(rung, recipe, setting))
    if verdict.failure == "host-oom" and setting.gpus_per_node > 0:
        return Lowered(
            None, "host memory ran out, which a smaller micro-batch on the GPU does not help: "
            "ask for more memory_per_node, fewer DataLoader workers, or less offload"
        )  # fmt: skip
    if verdict.phase in STATES_ALONE:
        place = "the optimizer step" if verdict.phase == "optimizer" else verdict.phase
        cure = less_for_states(verdict)
        return Lowered(None, f"memory ran out in {place}, where a smaller micro-batch does not help: {cure}")
    if verdict.phase == "probe":
        return Lowered(None, "no micro-batch fits, and the plan has nothing else to give up")
    smaller = one_lower(recipe, setting)
    if smaller is None:
        least = 2 if setting.batch_norm else 1
        return Lowered(
            None, f"the micro-batch is {recipe.micro_batch_size} already, the least here is {least}"
        )
    return Lowered(smaller, words_of(smaller, recipe, setting))


def lower_within(recipe: Recipe, setting: Setting, planned: Sequence[Recipe] = ()) -> Recipe | None:
    """What a run that ran out of memory in forward or backward goes on with, without a restart: the plan's
    next rung where that changes nothing that is built, else a smaller micro-batch. None at their end, and for
    BatchNorm, whose statistics it changes, while the plan has anything else to give up."""
    below = _below(recipe, planned)
    for rung in below[:1]:
        if rung.changes_from(recipe).keys() <= WITHIN_A_RUN and not broken_rules(rung, setting):
            return rung
    if setting.batch_norm and any(rung.micro_batch_size == recipe.micro_batch_size for rung in below):
        return None
    return one_lower(recipe, setting)


def keeps_micro_batch(recipe: Recipe, setting: Setting, planned: Sequence[Recipe] = ()) -> bool:
    """Whether a model with BatchNorm for which `recipe` is too large has a rung with the same micro-batch:
    one for `lower` after a failure in the probe, which takes a restart."""
    below = _below(recipe, planned, tried=True)
    return setting.batch_norm and any(
        rung.micro_batch_size == recipe.micro_batch_size and not broken_rules(rung, setting) for rung in below
    )


def _below(recipe: Recipe, planned: Sequence[Recipe], *, tried: bool = False) -> Sequence[Recipe]:
    """The plan's rungs below `recipe`, which may have left the ladder for micro-batches of its own: then
    nothing comes back that it has given up. `tried`: no micro-batch of it will do, so those with something
    else changed."""
    size = recipe.micro_batch_size
    alike = [at for at, rung in enumerate(planned) if rung.changes_from(recipe).keys() <= WITHIN_A_RUN]
    if not alike:
        return ()
    if tried:
        return planned[alike[-1] + 1 :]
    if recipe in planned:
        return planned[planned.index(recipe) + 1 :]
    above = [at for at in alike if planned[at].micro_batch_size >= size]
    below = planned[above[-1] + 1 :] if above else planned[alike[0] :]
    return [lower for rung in below if (lower := _with_less_of(rung, recipe)) != recipe]


def _with_less_of(rung: Recipe, recipe: Recipe) -> Recipe:
    """`rung`, with no more of WITHIN_A_RUN than `recipe` has."""
    smaller = with_micro_batch(rung, min(recipe.micro_batch_size, rung.micro_batch_size))
    each = "each" if "each" in (recipe.grad_sync, rung.grad_sync) else "last"
    chunks = max(recipe.loss_chunks, rung.loss_chunks)
    return smaller.model_copy(update={"grad_sync": each, "loss_chunks": chunks})


def _helps(rung: Recipe, recipe: Recipe, verdict: Verdict, setting: Setting) -> bool:
    """Whether it needs less of what ran out. Of the GPU as a whole every rung below needs less."""
    if verdict.failure == "host-oom" and setting.gpus_per_node > 0:
        return recipe.activations == "offload" != rung.activations and rung.offload == recipe.offload
    if verdict.failure == "host-oom" and _moves_more_to_host(rung, recipe):
        return False
    if verdict.phase not in STATES_ALONE:
        return True
    if shards_of(rung, setting) > shards_of(recipe, setting):
        return True
    if verdict.phase == "init":  # parameters alone: states come with the first step
        return rung.offload == "cpu" != recipe.offload
    return rung.offload != recipe.offload or rung.optimizer != recipe.optimizer


def less_for_states(verdict: Verdict) -> str:
    """What a user can do when memory runs out in one of STATES_ALONE."""
    ways = ["more ranks under sharding: fsdp"]
    ways += ["an 8-bit optimizer"] if verdict.phase != "init" else []
    ways += ["offload: cpu"] if verdict.failure == "gpu-oom" else ["more memory_per_node"]
    return f"what helps is {', '.join(ways)}, or a smaller model"


def _moves_more_to_host(rung: Recipe, recipe: Recipe) -> bool:
    activations = rung.activations == "offload" != recipe.activations
    return activations or rung.offload not in ("none", recipe.offload)


def shards_of(recipe: Recipe, setting: Setting) -> int:
    """Parts that states are cut into, as launcher.memory.states.Ranks.shards counts them."""
    if recipe.sharding not in SHARDED:
        return 1
    return setting.ranks // setting.nodes if recipe.sharding == "hybrid" else setting.ranks


def words_of(new: Recipe, old: Recipe, setting: Setting) -> str:
    """What changes, for a person."""
    changes = {name: pair for name, pair in new.changes_from(old).items() if name != "grad_accum"}
    parts = []
    if changes.pop("micro_batch_size", None):
        parts.append(
            f"micro-batch {old.micro_batch_size} -> {new.micro_batch_size}, accumulation "
            f"{old.grad_accum} -> {new.grad_accum}; the global batch stays "
            f"{new.micro_batch_size * new.grad_accum * setting.ranks}"
        )
    if changes.pop("grad_sync", None):
        parts.append("grad_sync last -> each: no rank keeps whole gradients until the last micro-batch")
    parts += [f"{name} {as_yaml(was)} -> {as_yaml(is_now)}" for name, (was, is_now) in changes.items()]
    return ", ".join(parts)

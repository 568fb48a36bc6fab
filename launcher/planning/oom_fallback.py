"""Choose the recipe to fall back to after an OOM: the rungs below a recipe, and why rungs are skipped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from launcher.planning.micro_batches import (
    WITHIN_A_RUN,
    accumulating_instead,
    ladder,
    one_lower,
    with_micro_batch,
)
from launcher.spec.mesh import data_ranks, shards, state_shards
from launcher.spec.optimizer_table import OPTIMIZERS
from launcher.spec.recipe import SHARDED, Recipe
from launcher.spec.recipe_rules import Rule, Setting, as_yaml, broken_rules, changes_line
from launcher.spec.verdict import Verdict

STATES_ALONE = frozenset({"init", "optimizer", "checkpoint"})
"""Phases without activations, including the loading of a checkpoint. Parameters and optimizer states do not
fit, so a smaller micro-batch does not help."""

COUPLED = "the loss couples samples: with a smaller micro-batch the objective may have changed"


@dataclass(frozen=True)
class Excluded:
    """A rung of the plan that is skipped."""

    rung: Recipe
    why: str
    restart: str = ""
    "The rung's changes that need a restart, if the run does not try them at all."


@dataclass(frozen=True)
class Lowered:
    """The recipe to fall back to; None at the bottom of the ladder."""

    recipe: Recipe | None
    reason: str
    excluded: tuple[Excluded, ...] = ()
    "The plan's rungs that are skipped before `recipe`; all remaining rungs if `recipe` is None."

    @property
    def left_out(self) -> tuple[str, ...]:
        """A line for each change that needs a restart and is not tried."""
        return tuple(dict.fromkeys(f"{each.restart} ({each.why})" for each in self.excluded if each.restart))


def within_a_run(recipe: Recipe, setting: Setting, planned: Sequence[Recipe] = ()) -> tuple[Recipe, ...]:
    """Return every rung below `recipe` that needs no restart, the next one first.

    First come the plan's rungs, restricted to WITHIN_A_RUN, then those of `ladder`. If a smaller micro-batch
    changes what is learnt, the rungs end before it while a restart can still keep the micro-batch.
    """
    rungs, below = [recipe], _below(recipe, planned)

    def follow(*, keep: bool) -> None:
        for rung in below:
            lower = _with_run_fields(recipe, _with_less(rung, rungs[-1], keep=keep))
            if lower != rungs[-1] and not _newly_broken(lower, recipe, setting):
                rungs.append(lower)

    if _lowers_micro_batch_last(setting):
        follow(keep=True)
        rungs += _of_same_size(rungs[-1], setting)
        others = (
            _with_run_fields(rung, recipe) for rung in below if _restart_key(rung) != _restart_key(recipe)
        )
        if setting.why_micro_batch_stays is not None or any(
            not _newly_broken(other, recipe, setting) for other in others
        ):
            return tuple(rungs[1:])
    follow(keep=False)
    return (*rungs[1:], *ladder(rungs[-1], setting))


def why_none_within(recipe: Recipe, setting: Setting) -> str:
    """Return why `within_a_run` has nothing below `recipe`."""
    if recipe.micro_batch_size > setting.least_micro_batch and _lowers_micro_batch_last(setting):
        what = "a model with BatchNorm" if setting.batch_norm else "a loss that couples samples"
        first = f"{what} lowers its micro-batch last, and the plan's other changes need a restart"
        return setting.why_micro_batch_stays or first
    return "nothing is left to give up without a restart"


def lower(recipe: Recipe, verdict: Verdict, setting: Setting, planned: Sequence[Recipe] = ()) -> Lowered:
    """Return the next rung for a failure, from `planned` (the plan's recipe and ladder), else from `ladder`.

    A smaller micro-batch shrinks only activations. It does not help if the states do not fit, or if the host
    is full while activations are on a GPU. A probe that ran out of memory has tried all of `within_a_run`;
    after another change, the next probe tries them again. The last resort below `optimizer_step: backward` is
    accumulation: without an estimate, only an attempt shows whether it saves memory.
    """
    excluded: dict[Recipe, Excluded] = {}
    for rung, lowered in _candidates(recipe, verdict, setting, planned):
        if lowered != recipe:
            why = _why_not(lowered, recipe, verdict, setting)
        else:
            why = _why_no_change(rung, recipe, verdict, setting, planned)
        if why is not None:
            excluded[rung] = Excluded(rung, why, changes_line(_with_run_fields(rung, recipe), recipe))
            continue
        excluded.pop(rung, None)
        if lowered != rung:
            excluded[rung] = Excluded(rung, f"tried after other changes: {changes_line(lowered, rung)}")
        return Lowered(lowered, words_of(lowered, recipe, setting), tuple(excluded.values()))
    smaller = one_lower(recipe, setting) if not _needs_restart(verdict) else None
    if verdict.phase not in STATES_ALONE:  # a probe has not tried what needs a restart
        smaller = smaller or accumulating_instead(recipe, setting)
    if smaller is not None and not _full_host_of_gpus(verdict, setting):
        return Lowered(smaller, words_of(smaller, recipe, setting), tuple(excluded.values()))
    nothing = Lowered(None, _why_nothing(recipe, verdict, setting), tuple(excluded.values()))
    refusals = "; left out: ".join(filter(None, (nothing.reason, "; ".join(nothing.left_out))))
    return Lowered(None, refusals, nothing.excluded)


def _candidates(
    recipe: Recipe, verdict: Verdict, setting: Setting, planned: Sequence[Recipe]
) -> Iterator[tuple[Recipe, Recipe]]:
    """Yield the plan's rungs below `recipe`, each with the recipe that the run would use for it.

    That recipe keeps everything that the run has already given up at `recipe`.
    """
    below = _below(recipe, planned)
    if _needs_restart(verdict):
        yield from ((rung, _with_run_fields(rung, recipe)) for rung in below)
        return
    if _lowers_micro_batch_last(setting):
        yield from ((rung, _with_less(rung, recipe, keep=True)) for rung in below)
        yield from ((rung, rung) for rung in _of_same_size(recipe, setting))
    if setting.why_micro_batch_stays is None:
        yield from ((rung, _with_less(rung, recipe)) for rung in below)


def _why_no_change(
    rung: Recipe, recipe: Recipe, verdict: Verdict, setting: Setting, planned: Sequence[Recipe]
) -> str:
    """Return why a rung is skipped that would change nothing."""
    tried = [recipe]
    if verdict.phase in STATES_ALONE:
        return f"changes nothing that is in memory during {verdict.phase}"
    if _needs_restart(verdict):
        tried += within_a_run(recipe, setting, planned)
    if any(_with_less(rung, earlier) == earlier for earlier in tried):
        return "needs no less than the recipe that ran out of memory"
    return setting.why_micro_batch_stays or "the micro-batch is lowered last"


def _why_not(lowered: Recipe, recipe: Recipe, verdict: Verdict, setting: Setting) -> str | None:
    """Return why `lowered` does not help, or None. Every lower rung needs less GPU memory in total."""
    if broken := _newly_broken(lowered, recipe, setting):
        return broken[0].reason
    if _full_host_of_gpus(verdict, setting):
        relieved = (
            recipe.activations == "offload" != lowered.activations and lowered.offload == recipe.offload
        )
        return None if relieved else "frees no host memory"
    if verdict.failure == "host-oom" and _moves_more_to_host(lowered, recipe):
        return "moves more to host memory, which ran out"
    if verdict.phase not in STATES_ALONE or shards_of(lowered, setting) > shards_of(recipe, setting):
        return None
    if verdict.phase == "init":  # parameters alone: states come with the first step
        return None if lowered.offload == "cpu" != recipe.offload else "needs as much memory for parameters"
    fewer = lowered.offload != recipe.offload or lowered.optimizer != recipe.optimizer
    fewer |= state_shards_of(lowered, setting) > state_shards_of(recipe, setting)
    return None if fewer else "needs as much memory for parameters and optimizer states"


def _newly_broken(made: Recipe, recipe: Recipe, setting: Setting) -> list[Rule]:
    """Return the rules that `made` breaks and `recipe` does not: the run may break one already, if its loss
    was found to couple samples while its micro-batch is one."""
    broken = (one.rule for one in broken_rules(made, setting))
    return [rule for rule in broken if not rule.broken(recipe, setting)]


def _why_nothing(recipe: Recipe, verdict: Verdict, setting: Setting) -> str:
    """Return why no recipe below `recipe` is left to try."""
    if _full_host_of_gpus(verdict, setting):
        return (
            "host memory ran out, where a smaller micro-batch on the GPU does not help: "
            "use more memory_per_node, fewer DataLoader workers, or less offload"
        )
    if verdict.phase in STATES_ALONE:
        place = "the optimizer step" if verdict.phase == "optimizer" else verdict.phase
        cure = less_for_states(verdict)
        return f"memory ran out in {place}, where a smaller micro-batch does not help: {cure}"
    size, least = recipe.micro_batch_size, setting.least_micro_batch
    if setting.why_micro_batch_stays is not None and size > least:
        return f"micro-batch {size} does not fit after all other changes, and {setting.why_micro_batch_stays}"
    if _needs_restart(verdict):
        return "no micro-batch fits, and the plan has no other change left"
    return f"the micro-batch is {size} already, the least here is {least}"


def _below(recipe: Recipe, planned: Sequence[Recipe]) -> list[Recipe]:
    """Return the plan's rungs that are still open to a run at `recipe`, which need not be a rung itself.

    Changes that need a restart are made in the plan's order and are not undone.
    """
    order = list(dict.fromkeys(map(_restart_key, planned)))
    if (current := _restart_key(recipe)) not in order:
        return []
    places = {rung: order.index(_restart_key(rung)) for rung in planned if rung != recipe}
    return sorted((rung for rung in places if places[rung] >= order.index(current)), key=places.__getitem__)


def _restart_key(recipe: Recipe) -> Recipe:
    """Return a key that is equal for all recipes among which a run can change without a restart."""
    least = {"micro_batch_size": 1, "grad_accum": 1, "grad_sync": "each", "loss_chunks": 1}
    return recipe.model_copy(update=least)


def _with_run_fields(recipe: Recipe, other: Recipe) -> Recipe:
    """Return `recipe` with the fields WITHIN_A_RUN of `other`."""
    return recipe.model_copy(update={name: getattr(other, name) for name in WITHIN_A_RUN})


def _with_less(rung: Recipe, recipe: Recipe, *, keep: bool = False) -> Recipe:
    """Return `rung`, with the fields WITHIN_A_RUN no larger than in `recipe`.

    `keep`: keep the micro-batch of `recipe`.
    """
    size = recipe.micro_batch_size
    smaller = with_micro_batch(rung, size if keep else min(size, rung.micro_batch_size))
    # With one micro-batch per step, both values of grad_sync reduce gradients once.
    gives_up = rung.grad_sync == "each" and smaller.grad_accum > 1
    each = "each" if recipe.grad_sync == "each" or gives_up else "last"
    chunks = max(recipe.loss_chunks, rung.loss_chunks)
    return smaller.model_copy(update={"grad_sync": each, "loss_chunks": chunks})


def _lowers_micro_batch_last(setting: Setting) -> bool:
    """Return whether the micro-batch is lowered last, or never."""
    return setting.keeps_micro_batch or setting.why_micro_batch_stays is not None


def _of_same_size(recipe: Recipe, setting: Setting) -> list[Recipe]:
    """Return the rungs of `ladder` with the micro-batch of `recipe`."""
    return [rung for rung in ladder(recipe, setting) if rung.micro_batch_size == recipe.micro_batch_size]


def _needs_restart(verdict: Verdict) -> bool:
    """Return whether no change within a run helps: all were tried, or they free nothing in this phase."""
    probed = verdict.phase == "probe" and verdict.failure == "gpu-oom"
    return probed or verdict.phase in STATES_ALONE


def _full_host_of_gpus(verdict: Verdict, setting: Setting) -> bool:
    return verdict.failure == "host-oom" and setting.gpus_per_node > 0


def ways_to_save(recipe: Recipe) -> str:
    """Return what a user can do after an OOM of this recipe: what it does not save yet."""
    ways = {
        "activations: checkpoint": recipe.activations in ("keep", "selective", "every-second"),
        "an 8-bit optimizer": not OPTIMIZERS[recipe.optimizer].eight_bit,
        "fsdp over more GPUs": recipe.sharding not in SHARDED,
        "more GPUs": recipe.sharding in SHARDED,
        "offload": not recipe.offloads,
    }
    return f"use {', '.join(way for way, saves in ways.items() if saves)}, or a smaller model"


def less_for_states(verdict: Verdict) -> str:
    """Return what a user can do after an OOM in one of STATES_ALONE."""
    ways = ["more ranks with sharding: fsdp"]
    ways += ["an 8-bit optimizer"] if verdict.phase != "init" else []
    ways += ["offload: cpu"] if verdict.failure == "gpu-oom" else ["more memory_per_node"]
    return f"use {', '.join(ways)}, or a smaller model"


def _moves_more_to_host(rung: Recipe, recipe: Recipe) -> bool:
    activations = rung.activations == "offload" != recipe.activations
    return activations or rung.offload not in ("none", recipe.offload)


def shards_of(recipe: Recipe, setting: Setting) -> int:
    """Return the number of shards of the parameters."""
    return shards(recipe, setting.ranks, setting.ranks // setting.nodes)


def state_shards_of(recipe: Recipe, setting: Setting) -> int:
    """Return the number of shards of the optimizer states, as Ranks.state_shards counts them."""
    return state_shards(recipe, setting.ranks, setting.ranks // setting.nodes)


def words_of(new: Recipe, old: Recipe, setting: Setting) -> str:
    """Return the changes from `old` to `new` as text for a user."""
    changes = {name: pair for name, pair in new.changes_from(old).items() if name != "grad_accum"}
    parts = []
    if changes.pop("micro_batch_size", None):
        parts.append(
            f"micro-batch {old.micro_batch_size} -> {new.micro_batch_size}, accumulation "
            f"{old.grad_accum} -> {new.grad_accum}; the global batch stays "
            f"{new.micro_batch_size * new.grad_accum * data_ranks(new, setting.ranks)}"
        )
        if setting.couples_samples and new.micro_batch_size < old.micro_batch_size:
            parts[0] += f"; {COUPLED}"
    if changes.pop("grad_sync", None):
        parts.append("grad_sync last -> each: no rank keeps whole gradients until the last micro-batch")
    parts += [f"{name} {as_yaml(was)} -> {as_yaml(is_now)}" for name, (was, is_now) in changes.items()]
    return ", ".join(parts)

"""The ladder of a planned recipe: the recipes that a run falls back to after an OOM, in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import JsonValue

from launcher.memory.allocator_blocks import LARGE_SEGMENT
from launcher.planning.fastest_recipe import Candidate, Capacity, Evaluate
from launcher.planning.micro_batches import accumulating_instead, smaller_micro_batch
from launcher.planning.oom_fallback import state_shards_of, words_of
from launcher.planning.space import Space
from launcher.spec.mesh import grad_sync_applies
from launcher.spec.optimizer_table import OPTIMIZERS, saved_as
from launcher.spec.quantities import format_bytes
from launcher.spec.recipe import Recipe
from launcher.spec.recipe_rules import Setting, as_yaml
from launcher.spec.value import Value

LEAST_SAVED = 0.02
"Minimum share of memory that a rung saves. After a smaller saving, another restart would likely follow."


class Rung(Value):
    """One step down, compared with the rung above it."""

    candidate: Candidate
    args: dict[str, JsonValue] = {}
    "Task arguments that differ from the job's."
    saved: int
    "Bytes on the GPU."
    slower: float
    "Share of the samples per second that is lost; negative if the rung is faster."
    words: str

    @property
    def recipe(self) -> Recipe:
        return self.candidate.recipe


def ladder_of(
    chosen: Candidate,
    space: Space,
    evaluate: Evaluate,
    capacity: Capacity,
    knobs: Mapping[str, Sequence[JsonValue]] | None = None,
) -> tuple[tuple[Rung, ...], tuple[str, ...]]:
    """Return the rungs below `chosen`, and a line for each value of `knobs` that is not a rung.

    Each rung changes one field: the one that loses the least speed per byte saved. Before the first one that
    offloads, FSDP gathers single layers, unless that is slower. Each rung needs less GPU memory than the one
    above, and fits the host. `knobs`: task arguments with their values in falling order, the job's own first,
    such as `{"max_frames": [100, 75, 50]}`. They change what is learnt, so they come last. So does a smaller
    micro-batch if the model has BatchNorm or the loss couples samples.
    """
    rungs: list[Rung] = []
    left_out: dict[str, str] = {}
    current, args = chosen, dict[str, JsonValue]()

    def cheapest(recipes: Sequence[Recipe]) -> Rung | None:
        candidates = (
            _rung(evaluate(recipe, args or None), args, current, args, space, capacity) for recipe in recipes
        )
        return _cheapest([*candidates], capacity)

    while True:
        rung = None
        for recipes in _changes_in_order(current.recipe, space):
            rung = cheapest(recipes)
            if rung is not None:
                break
        if not current.recipe.offloads and (rung is None or rung.recipe.offloads):
            # This costs another trace, so it is tried only before offload, which is mostly slower.
            layers = cheapest(space.layers_of(current.recipe))
            if layers is not None and (rung is None or layers.slower <= rung.slower):
                rung = layers
        if rung is None:
            rung = _cheapest(
                _knob_rungs(current, args, evaluate, space, capacity, knobs or {}, left_out), capacity
            )
        if rung is None:
            return tuple(rungs), tuple(f"plan.vary: {name} {why}" for name, why in left_out.items())
        rungs.append(rung)
        current, args = rung.candidate, rung.args


def confirmed(
    chosen: Candidate, rungs: Sequence[Rung], confirm: Evaluate, space: Space, capacity: Capacity
) -> tuple[Rung, ...]:
    """Return the rungs with figures from `confirm`, which must also have confirmed `chosen`."""
    confirmed_rungs: list[Rung] = []
    current, args = chosen, dict[str, JsonValue]()
    for rung in rungs:
        confirmed_rungs.append(
            _rung(confirm(rung.recipe, rung.args or None), rung.args, current, args, space, capacity)
        )
        current, args = confirmed_rungs[-1].candidate, rung.args
    return tuple(confirmed_rungs)


def _changes_in_order(recipe: Recipe, space: Space) -> Iterator[list[Recipe]]:
    """Yield lists of recipes. A list is used only if nothing in the earlier lists saves memory."""
    smaller = smaller_micro_batch(recipe, space.setting) or accumulating_instead(recipe, space.setting)
    fewer = [smaller] if smaller is not None else []
    same = [lower for lower in space.below(recipe) if can_continue(lower, recipe, space.setting)]
    if recipe.grad_sync == "last" and grad_sync_applies(recipe) and "grad_sync" not in space.axes:
        same += [recipe.model_copy(update={"grad_sync": "each"})]
    yield from (same, fewer) if space.setting.keeps_micro_batch else ([*same, *fewer],)


def _knob_rungs(
    current: Candidate,
    args: dict[str, JsonValue],
    evaluate: Evaluate,
    space: Space,
    capacity: Capacity,
    knobs: Mapping[str, Sequence[JsonValue]],
    left_out: dict[str, str],
) -> list[Rung]:
    """Return a rung for the next helpful value of each knob. Values without a saving go to `left_out`."""
    candidates = []
    for name, values in knobs.items():
        for value in values[_after(values, args.get(name)) :]:
            new = {**args, name: value}
            rung = _rung(evaluate(current.recipe, new), new, current, args, space, capacity)
            left_out.pop(f"{name} {as_yaml(value)}", None)
            if why := _no_help(rung, capacity):
                left_out[f"{name} {as_yaml(value)}"] = f"is not in the ladder: it {why}"
                continue
            candidates.append(rung)
            break
    return candidates


def _after(values: Sequence[JsonValue], value: JsonValue) -> int:
    """Return the index after `value`. The job's own value is the first one."""
    return values.index(value) + 1 if value in values else 1


def can_continue(recipe: Recipe, before: Recipe, setting: Setting) -> bool:
    """Return whether a run can continue under `recipe` from a checkpoint of `before` without losing anything.

    Sharding, offload, activations and micro-batch can change: docs/checkpoints.md. The optimizer cannot: its
    states have other names or types, so loading would fail or lose them. Only a paged optimizer saves the
    same states as the unpaged one. The precision cannot change: fp32 parameters would be rounded for good.
    8-bit states need the number of shards that saved them:
    launcher.train.optimizers.quantization_blocks.other_shards.
    """
    optimizer = saved_as(recipe.optimizer) == saved_as(before.optimizer)
    reshards = state_shards_of(recipe, setting) != state_shards_of(before, setting)
    readable = not (reshards and OPTIMIZERS[recipe.optimizer].eight_bit)
    return optimizer and readable and recipe.precision == before.precision


def _rung(
    candidate: Candidate,
    args: dict[str, JsonValue],
    above: Candidate,
    before: dict[str, Any],
    space: Space,
    capacity: Capacity,
) -> Rung:
    saved = above.estimate.needed - candidate.estimate.needed
    slower = 1 - candidate.speed / above.speed if above.speed else 0.0
    if args != before:
        changed = (f"{name} {as_yaml(new)}" for name, new in args.items() if before.get(name) != new)
        words = f"{', '.join(changed)}: changes the input and the training"
    else:
        words = words_of(candidate.recipe, above.recipe, space.setting)
    price = f", {slower:.0%} slower" if slower >= 0.005 else ""
    words = f"{words}; saves {format_bytes(saved)}{price}"
    if capacity.is_unknown_for(candidate.recipe):
        words += f"; needs {format_bytes(candidate.estimate.host_per_node)} of host memory in each node"
    return Rung(candidate=candidate, args=args, saved=saved, slower=slower, words=words)


def _no_help(rung: Rung, capacity: Capacity) -> str | None:
    above = rung.candidate.estimate.needed + rung.saved
    # The allocator reserves pages of LARGE_SEGMENT: a smaller saving may free none.
    least = max(round(LEAST_SAVED * above), LARGE_SEGMENT)
    if rung.saved <= least:
        saved = format_bytes(max(0, rung.saved))
        return f"saves {saved} of {format_bytes(above)}, not more than {format_bytes(least)}"
    return Capacity(host=capacity.host).misfit(rung.candidate.estimate)


def _cheapest(candidates: Sequence[Rung], capacity: Capacity) -> Rung | None:
    helpful = [rung for rung in candidates if _no_help(rung, capacity) is None]
    # The first key is 0 for rungs that lose no speed; the second takes the one that saves most.
    return min(helpful, key=lambda rung: (max(rung.slower, 0.0) / rung.saved, -rung.saved), default=None)

"""What to try when memory ran out: the next rung, or why there is none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import JsonValue

from launcher.planning.choice import Candidate, Evaluate, Room
from launcher.planning.space import Space
from launcher.spec.base import Value, format_bytes
from launcher.spec.recipe import EIGHT_BIT, SHARDED, Optimizer, Recipe
from launcher.spec.rules import Setting, as_yaml, broken_rules
from launcher.spec.verdict import Verdict

LEAST_SAVED = 0.02
"Of the memory above: a restart for less would likely be followed by the next one."


@dataclass(frozen=True)
class Lowered:
    """`recipe` is None at the bottom of the ladder."""

    recipe: Recipe | None
    reason: str


class Rung(Value):
    """One step down, compared with the rung above it."""

    candidate: Candidate
    args: dict[str, JsonValue] = {}
    "Arguments of the task that are not the job's."
    saved: int
    "Bytes on the GPU."
    slower: float
    "Share of the samples per second that is lost; negative when it is faster."
    words: str

    @property
    def recipe(self) -> Recipe:
        return self.candidate.recipe


def ladder_of(
    chosen: Candidate,
    space: Space,
    evaluate: Evaluate,
    room: Room,
    knobs: Mapping[str, Sequence[JsonValue]] | None = None,
) -> tuple[tuple[Rung, ...], tuple[str, ...]]:
    """The rungs below `chosen`, each the change of one field that loses least speed for each byte it saves;
    and a line for each value of `knobs` that is none.

    Every rung needs less of the GPU than the one above and fits the host. `knobs`: arguments of the task with
    their values in falling order, the job's own first, such as `{"max_frames": [100, 75, 50]}`. They change
    what is learnt, so they come after everything that does not; so does a smaller micro-batch, for a model
    with BatchNorm.
    """
    rungs: list[Rung] = []
    left_out: dict[str, str] = {}
    at, args = chosen, dict[str, JsonValue]()
    while True:
        rung = None
        for recipes in _kinds_of_change(at.recipe, space):
            made = [_rung(evaluate(recipe, args or None), args, at, args, space) for recipe in recipes]
            rung = _cheapest(made, room)
            if rung is not None:
                break
        if rung is None:
            rung = _cheapest(_turned(at, args, evaluate, space, room, knobs or {}, left_out), room)
        if rung is None:
            return tuple(rungs), tuple(f"plan.vary: {name} {why}" for name, why in left_out.items())
        rungs.append(rung)
        at, args = rung.candidate, rung.args


def _kinds_of_change(recipe: Recipe, space: Space) -> Iterator[list[Recipe]]:
    """A list is looked at when nothing in those before it saves anything."""
    smaller = _smaller_micro_batch(recipe, space.setting)
    fewer = [smaller] if smaller is not None else []
    same = [one for one in space.below(recipe) if can_go_on(one, recipe, space.setting)]
    if recipe.grad_sync == "last" and "grad_sync" not in space.axes:
        same += [recipe.model_copy(update={"grad_sync": "each"})]
    yield from (same, fewer) if space.setting.batch_norm else ([*same, *fewer],)


def _turned(
    at: Candidate,
    args: dict[str, JsonValue],
    evaluate: Evaluate,
    space: Space,
    room: Room,
    knobs: Mapping[str, Sequence[JsonValue]],
    left_out: dict[str, str],
) -> list[Rung]:
    """For each knob its next value that helps. Those before it, which do not, come into `left_out`."""
    made = []
    for name, values in knobs.items():
        for value in values[_after(values, args.get(name)) :]:
            new = {**args, name: value}
            rung = _rung(evaluate(at.recipe, new), new, at, args, space)
            left_out.pop(f"{name} {as_yaml(value)}", None)
            if why := _no_help(rung, room):
                left_out[f"{name} {as_yaml(value)}"] = f"is no rung of the ladder: it {why}"
                continue
            made.append(rung)
            break
    return made


def _after(values: Sequence[JsonValue], value: JsonValue) -> int:
    """The first value is the job's own."""
    return values.index(value) + 1 if value in values else 1


def can_go_on(recipe: Recipe, before: Recipe, setting: Setting) -> bool:
    """Whether a run may go on under `recipe` from a checkpoint of `before` without losing anything.

    Sharding, offload, activations, micro-batch: docs/checkpoints.md. Not another optimizer: its states have
    other names or types, and loading would fail or lose them; the paged one alone saves as the unpaged does.
    Not another precision: fp32 parameters would be rounded for good. And 8-bit states are read in as many
    shards as they were saved in (launcher.train.optimizers.blocks.other_shards), whatever the rows are.
    """
    paged: set[Optimizer] = {"adamw-8bit", "paged-adamw-8bit"}
    optimizer = recipe.optimizer == before.optimizer or {recipe.optimizer, before.optimizer} == paged
    shards = recipe.optimizer not in EIGHT_BIT or shards_of(recipe, setting) == shards_of(before, setting)
    return optimizer and shards and recipe.precision == before.precision


def _rung(
    candidate: Candidate, args: dict[str, JsonValue], above: Candidate, before: dict[str, Any], space: Space
) -> Rung:
    saved = above.estimate.needed - candidate.estimate.needed
    slower = 1 - candidate.speed / above.speed if above.speed else 0.0
    if args != before:
        changed = (f"{name} {as_yaml(new)}" for name, new in args.items() if before.get(name) != new)
        words = f"{', '.join(changed)}: another input, not the same training"
    else:
        words = _words(candidate.recipe, above.recipe, space.setting)
    price = f", {slower:.0%} slower" if slower >= 0.005 else ""
    words = f"{words}; saves {format_bytes(saved)}{price}"
    return Rung(candidate=candidate, args=args, saved=saved, slower=slower, words=words)


def _no_help(rung: Rung, room: Room) -> str | None:
    above = rung.candidate.estimate.needed + rung.saved
    if rung.saved <= LEAST_SAVED * above:
        saved = format_bytes(max(0, rung.saved))
        return f"saves {saved} of {format_bytes(above)}, not more than {LEAST_SAVED:.0%}"
    return Room(host=room.host).misfit(rung.candidate.estimate)


def _cheapest(made: Sequence[Rung], room: Room) -> Rung | None:
    helpful = [rung for rung in made if _no_help(rung, room) is None]
    # Of those that lose nothing the one that saves most.
    return min(helpful, key=lambda one: (max(one.slower, 0.0) / one.saved, -one.saved), default=None)


def ladder(recipe: Recipe, setting: Setting) -> tuple[Recipe, ...]:
    """Every rung below `recipe` that can be told without an estimate, the next one first."""
    rungs: list[Recipe] = []
    below = _next(recipe, setting)
    while below is not None:
        rungs.append(below)
        below = _next(below, setting)
    return tuple(rungs)


def lower(recipe: Recipe, verdict: Verdict, setting: Setting, planned: Sequence[Recipe] = ()) -> Lowered:
    """The rung that fits the failure: of `planned` (the plan's recipe and its ladder), else a smaller
    micro-batch.

    A smaller micro-batch shrinks activations only. An optimizer that does not fit, or a full host
    while the activations are on a GPU, would meet the same end again, more slowly.
    """
    below = planned[planned.index(recipe) + 1 :] if recipe in planned else ()
    for rung in below:
        if _helps(rung, recipe, verdict, setting) and not broken_rules(rung, setting):
            return Lowered(rung, _words(rung, recipe, setting))
    if verdict.phase == "optimizer":
        return Lowered(
            None, "memory ran out in the optimizer step, where a smaller micro-batch does not help: "
            "shard over more ranks, or choose an 8-bit optimizer or offload"
        )  # fmt: skip
    if verdict.failure == "host-oom" and setting.gpus_per_node > 0:
        return Lowered(
            None, "host memory ran out, which a smaller micro-batch on the GPU does not help: "
            "ask for more memory_per_node, fewer DataLoader workers, or less offload"
        )  # fmt: skip
    smaller = _next(recipe, setting)
    if smaller is None:
        least = 2 if setting.batch_norm else 1
        return Lowered(
            None, f"the micro-batch is {recipe.micro_batch_size} already, the least here is {least}"
        )
    return Lowered(smaller, _words(smaller, recipe, setting))


def _helps(rung: Recipe, recipe: Recipe, verdict: Verdict, setting: Setting) -> bool:
    """Whether it needs less of what ran out. Of the GPU as a whole every rung below needs less."""
    if verdict.failure == "host-oom" and setting.gpus_per_node > 0:
        return recipe.activations == "offload" != rung.activations and rung.offload == recipe.offload
    if verdict.phase == "optimizer":
        fewer_states = rung.offload != recipe.offload or rung.optimizer != recipe.optimizer
        return fewer_states or shards_of(rung, setting) > shards_of(recipe, setting)
    return True


def shards_of(recipe: Recipe, setting: Setting) -> int:
    """Parts that states are cut into, as launcher.memory.states.Ranks.shards counts them."""
    if recipe.sharding not in SHARDED:
        return 1
    return setting.ranks // setting.nodes if recipe.sharding == "hybrid" else setting.ranks


def _words(new: Recipe, old: Recipe, setting: Setting) -> str:
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

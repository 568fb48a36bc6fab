"""Plan a run again after it has begun: keep its fallbacks, and describe the changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from launcher.planning.plan import Plan
from launcher.rundir.recipe_changes import new_values
from launcher.spec.events import Event, RecipeChange, Replanned
from launcher.spec.recipe import Recipe

Changes = Mapping[str, tuple[Any, Any]]
"`{dotted field: (before, now)}`"

_SCHEDULE = "the learning rate follows the new schedule"
_CONSEQUENCES = {
    "batch.global": "each step takes this many samples; the order of the samples continues as if all steps "
    "so far had this size; the learning rate is not scaled",
    "steps": _SCHEDULE,
    "epochs": _SCHEDULE,
    "train.lr": _SCHEDULE,
    "train.warmup_steps": _SCHEDULE,
    "train.seed": "the samples come in another order",
}
"Field -> the effect of changing it, for fields that change the training."


def no_higher(plan: Plan, events: Sequence[Event], sets: Sequence[str]) -> Plan:
    """Return the plan, starting at or below the rung of its ladder that the run has fallen back to.

    `sets`: texts of `--set`, which take precedence.
    """
    learnt = stepped_down([*events, Replanned(set=list(sets))])
    rungs = (plan.recipe, *plan.ladder)
    start = next((at for at, rung in enumerate(rungs) if _as_low(rung, learnt)), len(rungs) - 1)
    if start == 0:
        return plan
    reason = f"{plan.reason}; it starts at the rung that the run fell back to"
    lower: dict[str, Any] = {"recipe": rungs[start], "ladder": rungs[start + 1 :], "reason": reason}
    if plan.ladder_speed:
        now, *below = plan.ladder_speed[start - 1 :]
        lower["ladder_speed"] = tuple(speed / now for speed in below)
        if plan.samples_per_second is not None:
            lower["samples_per_second"] = plan.samples_per_second * now
    return plan.model_copy(update=lower)


def stepped_down(events: Sequence[Event]) -> dict[str, Any]:
    """Return the recipe's fields that OOMs have changed, with their last values.

    After a climb, that is the earlier value. Fields that the user has set since are left out.
    """
    learnt: dict[str, Any] = {}
    for event in events:
        if isinstance(event, RecipeChange):
            learnt |= new_values(event)
        elif isinstance(event, Replanned):  # also if it was withdrawn: the user wanted these values
            for path in (text.partition("=")[0] for text in event.set):
                learnt.pop(path.removeprefix("recipe."), None)
                if path == "recipe":
                    learnt = {}
    return learnt


def _as_low(recipe: Recipe, learnt: Mapping[str, Any]) -> bool:
    """Return whether a recipe is as low as `learnt`.

    The accumulation is ignored: it follows from the micro-batch and the number of ranks.
    """
    return all(
        recipe.micro_batch_size <= value if name == "micro_batch_size" else getattr(recipe, name) == value
        for name, value in learnt.items()
        if name != "grad_accum"
    )


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the differences between two jobs, given as plain data."""
    old, new = dict(_leaves(before)), dict(_leaves(now))
    names = dict.fromkeys([*old, *new])
    return {name: (old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)}


def _leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def consequences(changed: Changes) -> list[str]:
    """Return a note for each change that changes the training. Only for a `task:` job, not for a command."""
    return [f"{name}: {_CONSEQUENCES[name]}" for name in changed if name in _CONSEQUENCES]

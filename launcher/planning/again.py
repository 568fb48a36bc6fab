"""Planning a run again that has begun: what memory has taught stays learnt, and what changes is said."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from launcher.planning.plan import Plan
from launcher.rundir.downgrades import new_values
from launcher.spec.events import Event, RecipeChange, Replanned
from launcher.spec.recipe import Recipe

Changes = Mapping[str, tuple[Any, Any]]
"`{dotted field: (before, now)}`"

_SCHEDULE = "the learning rate follows the new schedule"
_CONSEQUENCES = {
    "batch.global": "a step takes so many samples, the order of the samples goes on where that many steps of "
    "the new size would have ended, and the learning rate is not scaled",
    "steps": _SCHEDULE,
    "epochs": _SCHEDULE,
    "train.lr": _SCHEDULE,
    "train.warmup_steps": _SCHEDULE,
    "train.seed": "the samples come in another order",
}
"Of a change that makes it another training than the one that was submitted."


def no_higher(plan: Plan, events: Sequence[Event], sets: Sequence[str]) -> Plan:
    """This plan, begun no higher on its ladder than the run had to step down to, unless `sets` (texts of
    `--set`) say so."""
    learnt = stepped_down([*events, Replanned(set=list(sets))])
    rungs = (plan.recipe, *plan.ladder)
    start = next((at for at, rung in enumerate(rungs) if _as_low(rung, learnt)), len(rungs) - 1)
    if start == 0:
        return plan
    reason = f"{plan.reason}; it starts where memory had made the run step down to"
    lower: dict[str, Any] = {"recipe": rungs[start], "ladder": rungs[start + 1 :], "reason": reason}
    if plan.ladder_speed:
        now, *below = plan.ladder_speed[start - 1 :]
        lower["ladder_speed"] = tuple(speed / now for speed in below)
        if plan.samples_per_second is not None:
            lower["samples_per_second"] = plan.samples_per_second * now
    return plan.model_copy(update=lower)


def stepped_down(events: Sequence[Event]) -> dict[str, Any]:
    """The fields of the recipe that running out of memory has changed, with their last value (after a climb
    that from before), but for those that the user has set since."""
    learnt: dict[str, Any] = {}
    for event in events:
        if isinstance(event, RecipeChange):
            learnt |= new_values(event)
        elif isinstance(event, Replanned):  # also one that was withdrawn: what was set was meant
            for path in (text.partition("=")[0] for text in event.set):
                learnt.pop(path.removeprefix("recipe."), None)
                if path == "recipe":
                    learnt = {}
    return learnt


def _as_low(recipe: Recipe, learnt: Mapping[str, Any]) -> bool:
    """The micro-batch decides; the accumulation follows from it and from the number of ranks."""
    return all(
        recipe.micro_batch_size <= value if name == "micro_batch_size" else getattr(recipe, name) == value
        for name, value in learnt.items()
        if name != "grad_accum"
    )


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Of two jobs as plain data."""
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
    """A note for each change that makes it another training. Of a `task:` job: a command sees to itself."""
    return [f"{name}: {_CONSEQUENCES[name]}" for name in changed if name in _CONSEQUENCES]

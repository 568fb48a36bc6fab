"""How the recipe changed in the course of a run, from its events."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from launcher.spec.recipe import Recipe

CHANGES = ("downgrade", "climb")


def downgrades_within(events: Iterable[dict[str, Any]], attempt: int) -> list[dict[str, Any]]:
    """The events of those that cost no restart, in order."""
    return [event for event in changes_within(events, attempt) if event["event"] == "downgrade"]


def changes_within(events: Iterable[dict[str, Any]], attempt: int) -> list[dict[str, Any]]:
    """Downgrades and climbs that cost no restart, in order."""
    return [
        event
        for event in events
        if event.get("event") in CHANGES and event.get("in_process") and event.get("attempt") == attempt
    ]


def recipe_in_force(begun: Recipe, events: Iterable[dict[str, Any]], attempt: int) -> Recipe:
    """The attempt's recipe as it is now, or was at its end. `recipe.json` keeps what it began with."""
    recipe = begun
    for event in changes_within(events, attempt):
        recipe = changed(recipe, event)
    return recipe


def changed(recipe: Recipe, event: dict[str, Any]) -> Recipe:
    """`recipe` after one of CHANGES."""
    return Recipe.model_validate(recipe.model_dump() | _new(event))


def ran_out(events: Iterable[dict[str, Any]]) -> tuple[Recipe, ...]:
    """The recipes that a GPU's memory was too small for, but for those that the run came back to and kept."""
    found: list[dict[str, Any]] = []
    now: dict[str, Any] = {}
    ended = ""
    for event in events:
        kind = event.get("event")
        if kind == "attempt":
            now = event["recipe"]
        elif kind == "ended":
            ended = event["failure"]
        elif kind in CHANGES and now:
            before, now = now, now | _new(event)
            if kind == "climb":
                found = [one for one in found if one != now]
            elif event.get("in_process") or ended == "gpu-oom":
                found.append(before)
    return tuple(Recipe.model_validate(one) for one in found)


def _new(event: dict[str, Any]) -> dict[str, Any]:
    return {name: new for name, (_, new) in event.get("changes", {}).items()}

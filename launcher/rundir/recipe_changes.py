"""Find out from a run's events how its recipe changed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from launcher.spec.events import AttemptEnded, AttemptStarted, Climb, Downgrade, Event, RecipeChange
from launcher.spec.recipe import Recipe


def downgrades_within(events: Iterable[Event], attempt: int) -> list[Downgrade]:
    """The attempt's downgrades without a restart, in order."""
    return [event for event in changes_within(events, attempt) if isinstance(event, Downgrade)]


def changes_within(events: Iterable[Event], attempt: int) -> list[RecipeChange]:
    """The attempt's downgrades and climbs without a restart, in order."""
    changes = (event for event in events if isinstance(event, RecipeChange))
    return [change for change in changes if change.in_process and change.attempt == attempt]


def recipe_in_force(initial: Recipe, events: Iterable[Event], attempt: int) -> Recipe:
    """The attempt's recipe now, or at its end. `recipe.json` keeps its first one."""
    recipe = initial
    for change in changes_within(events, attempt):
        recipe = changed(recipe, change)
    return recipe


def changed(recipe: Recipe, change: RecipeChange) -> Recipe:
    """`recipe` after the change."""
    return Recipe.model_validate(recipe.model_dump() | new_values(change))


def ran_out(events: Iterable[Event]) -> tuple[Recipe, ...]:
    """The recipes that ran out of GPU memory, except those that the run later returned to and kept."""
    recipes: list[dict[str, Any]] = []
    now: dict[str, Any] = {}
    ended = ""
    for event in events:
        if isinstance(event, AttemptStarted):
            now = event.recipe
        elif isinstance(event, AttemptEnded):
            ended = event.failure
        elif isinstance(event, RecipeChange) and now:
            before, now = now, now | new_values(event)
            if isinstance(event, Climb):
                recipes = [recipe for recipe in recipes if recipe != now]
            elif event.in_process or ended == "gpu-oom":
                recipes.append(before)
    return tuple(map(Recipe.model_validate, recipes))


def new_values(change: RecipeChange) -> dict[str, Any]:
    """Field of the recipe -> its value after the change."""
    return {name: new for name, (_, new) in (change.changes or {}).items()}

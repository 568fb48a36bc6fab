"""What events.jsonl tells about recipes: the changes that an attempt made to its own while it ran."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from launcher.spec.recipe import Recipe


def downgrades_within(events: Iterable[dict[str, Any]], attempt: int) -> list[dict[str, Any]]:
    """The events of those that cost no restart, in order."""
    return [
        event
        for event in events
        if event.get("event") == "downgrade" and event.get("in_process") and event.get("attempt") == attempt
    ]


def recipe_in_force(begun: Recipe, events: Iterable[dict[str, Any]], attempt: int) -> Recipe:
    """The attempt's recipe as it is now, or was at its end. `recipe.json` keeps what it began with."""
    values = begun.model_dump()
    for event in downgrades_within(events, attempt):
        values |= {name: new for name, (_, new) in event["changes"].items()}
    return Recipe.model_validate(values)

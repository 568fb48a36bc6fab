"""What events tell of the recipe: in force, and too large."""

from __future__ import annotations

from typing import Any

from launcher.rundir.recipe_changes import ran_out, recipe_in_force
from launcher.spec.events import AttemptEnded, AttemptStarted, Climb, Downgrade, RecipeChange
from launcher.spec.recipe import Recipe


def recipe(micro: int) -> Recipe:
    sizes = {"micro_batch_size": micro, "grad_accum": 8 // micro}
    return Recipe.model_validate({"precision": "fp32", "optimizer": "adamw", "sharding": "fsdp", **sizes})


def attempt(number: int, micro: int) -> AttemptStarted:
    return AttemptStarted(attempt=number, recipe=recipe(micro).model_dump())


def ended(number: int, failure: str) -> AttemptEnded:
    return AttemptEnded(attempt=number, failure=failure, reason="")


def change(kind: type[RecipeChange], number: int, before: int, after: int, **fields: Any) -> RecipeChange:
    return kind(attempt=number, changes=recipe(after).changes_from(recipe(before)), **fields)


def test_a_run_that_went_back_up_is_there():
    within = {"in_process": True}
    events = [attempt(0, 8), change(Downgrade, 0, 8, 4, **within), change(Climb, 0, 4, 8, **within)]
    assert recipe_in_force(recipe(8), events[:2], 0) == recipe(4)
    assert recipe_in_force(recipe(8), events, 0) == recipe(8)


def test_what_ran_out_is_what_was_left_for_less_within_an_attempt_or_by_a_restart():
    events = [
        attempt(0, 8),
        change(Downgrade, 0, 8, 4, in_process=True),
        ended(0, "gpu-oom"),
        change(Downgrade, 0, 4, 2),
        attempt(1, 2),
        ended(1, "host-oom"),
        change(Downgrade, 1, 2, 1),
        attempt(2, 1),
    ]
    assert ran_out(events) == (recipe(8), recipe(4)), "a full host says nothing about the GPU"


def test_what_the_run_came_back_to_did_not_run_out_unless_it_did_again():
    up, down = change(Climb, 0, 4, 8, in_process=True), change(Downgrade, 0, 8, 4, in_process=True)
    assert ran_out([attempt(0, 8), down, up]) == ()
    assert ran_out([attempt(0, 8), down, up, down]) == (recipe(8),)

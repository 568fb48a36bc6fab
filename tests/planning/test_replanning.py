"""A run that is planned again: what memory has taught is kept, unless the user says otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.planning.plan import make_plan
from launcher.planning.replanning import changes, consequences, no_higher
from launcher.spec.cluster import Cluster
from launcher.spec.events import Climb, Downgrade, Event, Replanned
from launcher.spec.job import Job

HERE = Cluster.model_validate({"name": "here", "scheduler": "local"})
STEPPED_DOWN = Downgrade(changes={"micro_batch_size": (4, 2), "grad_accum": (2, 4)})


def planned(ranks: int, events: list[Event], *sets: str, **recipe: Any) -> tuple[int, int]:
    job = Job.model_validate(
        {
            "name": "again",
            "task": "a:B",
            "batch": {"global": 16},
            "steps": 1,
            "resources": {"gpus_per_node": 0, "ranks_per_node": ranks},
            "recipe": recipe,
        }
    )
    plan = no_higher(make_plan(job, HERE), events, sets)
    assert all(rung.micro_batch_size < plan.recipe.micro_batch_size for rung in plan.ladder)
    return plan.recipe.micro_batch_size, plan.recipe.grad_accum


@pytest.mark.parametrize(("ranks", "batch"), [(1, (2, 8)), (2, (2, 4)), (8, (2, 1)), (16, (1, 1))])
def test_the_micro_batch_stays_where_memory_had_made_it_go(ranks: int, batch: tuple[int, int]) -> None:
    assert planned(ranks, [STEPPED_DOWN]) == batch


def test_a_run_that_climbed_back_begins_where_it_had_climbed_to() -> None:
    climb = Climb(changes={"micro_batch_size": (2, 4), "grad_accum": (4, 2)})
    assert planned(2, [STEPPED_DOWN, climb]) == (4, 2)
    assert planned(2, [STEPPED_DOWN, climb, STEPPED_DOWN]) == (2, 4)


def test_the_speeds_of_the_rungs_that_are_left_are_those_of_the_new_beginning() -> None:
    job = Job.model_validate(
        {"name": "j", "task": "a:B", "batch": {"global": 8}, "steps": 1, "resources": {"gpus_per_node": 0}}
    )
    plan = make_plan(job, HERE).model_copy(update={"ladder_speed": (0.8, 0.6, 0.3)})
    assert [rung.micro_batch_size for rung in plan.ladder] == [4, 2, 1]
    lower = no_higher(plan, [STEPPED_DOWN], [])
    assert (lower.recipe.micro_batch_size, lower.ladder_speed) == (2, (pytest.approx(0.5),))
    assert no_higher(plan, [], []).ladder_speed == plan.ladder_speed


def test_a_run_that_never_ran_out_of_memory_starts_at_the_largest_micro_batch() -> None:
    assert planned(2, []) == (8, 1)


def test_what_the_user_sets_wins_over_what_memory_has_taught_also_later() -> None:
    again = Replanned(set=["recipe.micro_batch_size=4"])
    assert planned(2, [STEPPED_DOWN], "recipe.micro_batch_size=4", micro_batch_size=4) == (4, 2)
    assert planned(2, [STEPPED_DOWN, again], "steps=9", micro_batch_size=4) == (4, 2)
    assert planned(2, [again, STEPPED_DOWN], "steps=9", micro_batch_size=4) == (2, 4)


def test_changes_are_told_by_their_dotted_names_and_consequences_only_where_there_are_some() -> None:
    changed = changes(
        {"batch": {"global": 8}, "steps": 4, "args": {}},
        {"batch": {"global": 16}, "steps": 4, "args": {"n": 1}},
    )
    assert changed == {"batch.global": (8, 16), "args.n": (None, 1)}
    assert [note.partition(":")[0] for note in consequences(changed)] == ["batch.global"]

"""The cut of a model into stages, and the order of their passes."""

from __future__ import annotations

from collections import Counter

import pytest

from launcher.spec.recipe import Schedule
from launcher.spec.schedule import (
    SCHEDULES,
    Action,
    DeadlockError,
    balanced,
    bubble,
    finish,
    in_flight,
    one_f_one_b,
)
from tests.train.runs import recipe


def test_the_stages_of_a_report_and_of_a_model_with_a_large_vocabulary() -> None:
    assert balanced([1] * 57, 0, 0, 2) == (28, 29)
    assert balanced([10] * 7, before=25, after=3, stages=3) == (1, 3, 3)
    assert balanced([5, 1, 1, 1, 1, 1], 0, 0, 2) == (1, 5)
    assert balanced([1, 1, 1], 100, 100, 3) == (1, 1, 1)
    with pytest.raises(ValueError, match="2 blocks cannot be divided into 3 stages"):
        balanced([1, 1], 0, 0, 3)


SIZES = [(2, 1), (2, 5), (3, 2), (4, 4), (4, 11), (16, 40)]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_no_stage_waits_for_one_that_waits_and_the_bubble_is_that_of_the_papers(
    schedule: Schedule, stages: int, micro_batches: int
) -> None:
    table = SCHEDULES[schedule](stages, micro_batches)
    for actions in table:
        assert Counter(actions) == Counter(
            Action(kind, index) for kind in ("forward", "backward") for index in range(micro_batches)
        )
    assert len(finish(table)) == stages
    asked = recipe(schedule=schedule, pipeline=stages, accumulation=micro_batches)
    assert bubble(asked) == pytest.approx((stages - 1) / micro_batches)


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_what_a_stage_holds_follows_from_its_actions(stages: int, micro_batches: int) -> None:
    held = {
        schedule: [
            in_flight(recipe(schedule=schedule, pipeline=stages, accumulation=micro_batches), stage)
            for stage in range(stages)
        ]
        for schedule in SCHEDULES
    }
    assert held["gpipe"] == [micro_batches] * stages
    assert held["1f1b"] == [min(stages - stage, micro_batches) for stage in range(stages)]


def test_a_schedule_whose_stages_wait_for_each_other_is_found() -> None:
    forward, backward = Action("forward", 0), Action("backward", 0)
    with pytest.raises(DeadlockError, match="all stages wait: 0 in backward 0, 1 in forward 0"):
        finish(((backward, forward), (forward, backward)))
    # The second message waits until the first is received, so an order of its own is not possible either.
    other = Action("forward", 1)
    with pytest.raises(DeadlockError, match="all stages wait: 0 in forward 1, 1 in forward 1"):
        finish(((forward, other), (other, forward)))


def test_1f1b_is_the_order_of_the_paper() -> None:
    order = [" ".join(f"{kind[0]}{at}" for kind, at in actions) for actions in one_f_one_b(3, 4)]
    assert order == ["f0 f1 f2 b0 f3 b1 b2 b3", "f0 f1 b0 f2 b1 f3 b2 b3", "f0 b0 f1 b1 f2 b2 f3 b3"]

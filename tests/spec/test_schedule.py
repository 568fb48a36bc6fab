"""The cut of a model into stages, and the order of their passes."""

from __future__ import annotations

from collections import Counter

import pytest

from launcher.spec.recipe import Recipe
from launcher.spec.schedule import balanced, in_flight, passes
from tests.train.runs import recipe


def test_the_stages_of_a_report_and_of_a_model_with_a_large_vocabulary() -> None:
    assert balanced([1] * 57, 0, 0, 2) == (28, 29)
    assert balanced([10] * 7, before=25, after=3, stages=3) == (1, 3, 3)
    assert balanced([5, 1, 1, 1, 1, 1], 0, 0, 2) == (1, 5)
    assert balanced([1, 1, 1], 100, 100, 3) == (1, 1, 1)
    with pytest.raises(ValueError, match="2 blocks cannot be divided into 3 stages"):
        balanced([1, 1], 0, 0, 3)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 1), (2, 5), (3, 2), (4, 4), (4, 11), (16, 40)])
def test_no_stage_waits_for_one_that_waits_and_none_holds_more_than_is_said(
    schedule: str, stages: int, micro_batches: int
) -> None:
    """Each send waits until the one before has arrived, as launcher.train.pipeline.channel does."""
    asked = recipe(schedule=schedule, pipeline=stages, accumulation=micro_batches)
    turns = [list(passes(asked, stage)) for stage in range(stages)]
    for todo in turns:
        assert Counter(todo) == Counter(
            (kind, index) for kind in ("forward", "backward") for index in range(micro_batches)
        )
    done = [0] * stages
    held, most = [0] * stages, [0] * stages
    while any(at < len(todo) for at, todo in zip(done, turns, strict=True)):
        ready = [stage for stage in range(stages) if _can_go_on(turns, done, stage)]
        assert ready, "all stages wait"
        for stage in ready:
            held[stage] += 1 if turns[stage][done[stage]][0] == "forward" else -1
            most[stage] = max(most[stage], held[stage])
            done[stage] += 1
    assert most == [in_flight(asked, stage) for stage in range(stages)]


def _can_go_on(turns: list[list[tuple[str, int]]], done: list[int], stage: int) -> bool:
    if done[stage] == len(turns[stage]):
        return False
    kind, index = turns[stage][done[stage]]
    way = 1 if kind == "forward" else -1

    def has_done(other: int, number: int) -> bool:
        return not 0 <= other < len(turns) or number < 0 or (kind, number) in turns[other][: done[other]]

    return has_done(stage - way, index) and has_done(stage + way, index - 1)


def test_1f1b_is_the_order_of_the_paper() -> None:
    asked: Recipe = recipe(pipeline=3, accumulation=4)
    order = [" ".join(f"{kind[0]}{at}" for kind, at in passes(asked, stage)) for stage in range(3)]
    assert order == ["f0 f1 f2 b0 f3 b1 b2 b3", "f0 f1 b0 f2 b1 f3 b2 b3", "f0 b0 f1 b1 f2 b2 f3 b3"]

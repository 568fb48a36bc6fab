"""A step cut short on some ranks is finished with zeros, thrown away, repeated: the same gradients."""

from __future__ import annotations

from typing import Any

import pytest

from tests.train.runs import measure


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((2, 3), id="2"),
        pytest.param((2, 8), marks=pytest.mark.slow, id="2, more positions"),
        pytest.param((4, 8), marks=pytest.mark.thorough, id="4"),
    ],
)
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Ranks, and positions of failures. A hang ends in the timeout. 4 ranks pretend to be on two nodes."""
    ranks, positions = request.param
    env = {"DRAIN_POSITIONS": str(positions)}
    return measure("drains.py", tmp_path_factory.mktemp("drains"), ranks, 2, env=env)


def test_after_a_failure_anywhere_the_repeated_step_has_the_same_gradients_bit_for_bit(
    measured: dict[str, Any],
) -> None:
    for name, found in measured["sweeps"].items():
        assert found["failed"] >= 0.9 * found["steps"] > 0, (name, "else this test shows nothing")
        assert (found["again"], found["wrong"], found["static"]) == (0, 0, True), name


def test_no_memory_is_left_behind(measured: dict[str, Any]) -> None:
    assert not {name: found["left"] for name, found in measured["sweeps"].items() if found["left"]}


def test_less_than_a_complete_clean_up_gives_wrong_gradients(measured: dict[str, Any]) -> None:
    assert measured["careless"]
    for name, wrong in measured["careless"].items():
        assert wrong["clean"] == 0, name
        assert min(wrong["no gradients"], wrong["reset_iter_state"]) > 0, "else the tests show nothing"


def test_the_self_test_passes_and_would_notice_an_incomplete_clean_up(measured: dict[str, Any]) -> None:
    for sharding, (*sound, careless) in measured["self tests"].items():
        assert set(sound) == {None}, sharding
        assert "other gradients" in careless or "failed" in careless, sharding


def test_what_is_missing_is_known_unless_the_model_sends_something_else_each_time(
    measured: dict[str, Any],
) -> None:
    changing = "the model does not issue the same collectives in every micro-batch"
    own = "the task calls collectives itself, so the missing ones are unknown"
    assert measured["why not"] == [None, None, changing, own, own], (
        "second step, after an evaluation, a block left out, the task's own just now, and in the step before"
    )

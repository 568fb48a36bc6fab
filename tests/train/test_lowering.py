"""Memory runs out within a step: the run goes on in the same processes, on every rank, as if it had known."""

from __future__ import annotations

from typing import Any

import pytest

from tests.train.runs import measure


@pytest.fixture(scope="module", params=[1, 2, 4])
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A hang ends in the timeout. With 4 ranks they pretend to be on two nodes."""
    return measure("lowers.py", tmp_path_factory.mktemp("lowers"), request.param, 2)


def test_all_is_bit_for_bit_as_in_a_run_that_changed_in_time(
    measured: dict[str, Any],
) -> None:
    for name, cases in measured.items():
        for text, found in cases.items():
            print(f"{name:20} {text:60} {found['seconds']:.2f} s")
            assert found["recipe"], (name, text)
            assert not any(found["different"]), (name, text, found["different"])


def test_no_step_is_lost_or_done_twice_and_the_events_tell_where_it_was(measured: dict[str, Any]) -> None:
    for name, cases in measured.items():
        for text, found in cases.items():
            assert found["steps"] == [1, 2, 3, 4], (name, text)
            asked = dict(part.split("=") for part in text.split(","))
            assert found["events"] == [[int(asked["step"]), asked["phase"], True]], (name, text)


def test_nothing_is_left_in_memory(measured: dict[str, Any]) -> None:
    left = [found["left"] for cases in measured.values() for found in cases.values()]
    assert not any(left), left

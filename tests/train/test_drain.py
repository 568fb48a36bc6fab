"""A step cut short on some ranks is finished with zeros, discarded, repeated: no hang, no wrong gradient."""

from __future__ import annotations

from typing import Any

import pytest

from tests.train.runs import measure


@pytest.fixture(scope="module", params=[2, 4])
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A hang ends in the timeout. With 4 ranks they pretend to be on two nodes."""
    return measure("drains.py", tmp_path_factory.mktemp("drains"), request.param, 2)


def test_after_a_failure_anywhere_the_repeated_step_has_the_same_gradients_bit_for_bit(
    measured: dict[str, Any],
) -> None:
    for name, found in measured["sweeps"].items():
        print(name, found)
        assert found["failed"] >= 0.9 * found["steps"] > 0, (name, "else this test shows nothing")
        assert (found["again"], found["wrong"], found["static"]) == (0, 0, True), name


def test_no_memory_is_left_behind(measured: dict[str, Any]) -> None:
    assert {name: found["left"] for name, found in measured["sweeps"].items() if found["left"]} == {}

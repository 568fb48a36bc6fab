"""When a step is given up for the sake of those before it."""

from __future__ import annotations

import pytest

from launcher.train.handover.grace_period import given_up_at


@pytest.mark.parametrize(
    ("until", "step_ends", "start", "write", "expected"),
    [
        (100.0, None, 4.0, 0.0, 83.0),  # three starts of 4 s and 5 s of margin before
        (100.0, 30.0, 4.0, 2.0, 79.0),
        (100.0, 99.0, 4.0, 0.0, 83.0),  # it would end in time: perhaps it is a little faster
        (100.0, 99.0, 4.0, 2.0, 0.0),  # it would end, and could not be written
        (22.0, 300.0, 4.0, 0.1, 0.0),  # a step of minutes and Slurm's KillWait
        (22.0, None, 6.0, 0.1, 11.0),  # half of the time in any case
        (22.0, 5.0, 6.0, 0.1, 11.0),
    ],
)
def test_in_time(until: float, step_ends: float | None, start: float, write: float, expected: float) -> None:
    assert given_up_at(until, 0.0, step_ends, start, write) == pytest.approx(expected)

"""Which steps may change the model, and whether any did."""

from __future__ import annotations

import pytest

from launcher.train.scaler import LossScaler
from launcher.train.skipped_steps import MOST_IN_A_ROW, Guard
from launcher.train.task import TaskError


def guard_after(skipped: int, *, accepted: bool) -> Guard:
    """`skipped` steps whose batches have no target, and perhaps one that has one."""
    guard = Guard(LossScaler(False))
    for _ in range(skipped):
        assert guard.refuses(loss=0.0, weight=0.0, grad_norm=0.0)
    if accepted:
        assert guard.refuses(loss=1.0, weight=2.0, grad_norm=0.5) is None
    return guard


def test_a_training_none_of_whose_steps_changed_the_model_has_not_succeeded() -> None:
    with pytest.raises(TaskError, match="no step changed the model"):
        guard_after(1, accepted=False).check_trained(resumed=False)
    guard_after(50, accepted=True).check_trained(resumed=False)


def test_one_bad_batch_may_be_all_that_was_left_for_a_resumed_attempt_but_not_ten() -> None:
    guard_after(MOST_IN_A_ROW - 1, accepted=False).check_trained(resumed=True)
    with pytest.raises(TaskError, match=f"no step of the {MOST_IN_A_ROW} since the run was resumed changed"):
        guard_after(MOST_IN_A_ROW, accepted=False).check_trained(resumed=True)
    guard_after(50, accepted=True).check_trained(resumed=True)

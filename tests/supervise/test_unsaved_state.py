"""Which state lies in shared memory when a run ends, by its events."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.rundir.layout import RunDir
from launcher.spec.events import (
    AttemptStarted,
    CheckpointSaved,
    Event,
    Finished,
    HandedOver,
    HandoverSkipped,
    Resumed,
    SupervisorStarted,
)
from launcher.supervise.unsaved_state import Outcome, Skipped, UnsavedState, outcome_of, skipped_by, unsaved

STARTED = SupervisorStarted()
HANDOVER = HandedOver(attempt=1, step=7, bytes=1)
ATTEMPT = AttemptStarted(attempt=2, recipe={})
SKIPPED = HandoverSkipped(attempt=2, step=9, reason="rank 1 did not answer")
TAKEN = Resumed(step=7, from_="shared-memory")


def checkpoint(step: int) -> Event:
    return CheckpointSaved(step=step)


@pytest.mark.parametrize(
    ("events", "kept"),
    [
        ([STARTED, checkpoint(5), HANDOVER], UnsavedState(1, 7)),
        ([STARTED, HANDOVER, ATTEMPT], UnsavedState(1, 7)),  # attempt 2 failed before it could take it up
        ([STARTED, HANDOVER, ATTEMPT, TAKEN], None),
        ([STARTED, HANDOVER, ATTEMPT, TAKEN, SKIPPED], None),
        ([STARTED, HANDOVER, checkpoint(7)], None),
        ([STARTED, HANDOVER, STARTED], None),  # a supervisor removes what another one left
        ([], None),
    ],
)
def test_a_handover_is_unsaved_until_it_is_taken_up_or_a_checkpoint_is_as_new(
    events: list[Event], kept: UnsavedState | None
) -> None:
    assert unsaved(events) == kept


def test_only_the_last_attempt_tells_why_its_step_was_not_handed_over() -> None:
    assert skipped_by([STARTED, SKIPPED], 2) == Skipped(9, "rank 1 did not answer")
    assert skipped_by([STARTED, SKIPPED], 3) is None
    assert skipped_by([STARTED, SKIPPED, HANDOVER], 2) is None
    assert skipped_by([STARTED, HandoverSkipped(reason="another layout")], 2) is None


def test_the_last_end_of_a_run_tells_what_became_of_its_last_step() -> None:
    lost = Outcome(9, "the disk is full", 8)
    ends = [Finished(last_state=one._asdict()) for one in (Outcome(7, "", 7), lost)]
    assert outcome_of(ends) == lost and lost.words() == "step 9 is lost: the disk is full"
    assert Outcome(9, "the disk is full", 4).words() == "steps 5 to 9 are lost: the disk is full"
    assert Outcome(7, "", 7).words() == "the state of step 7 was written as a checkpoint"
    assert outcome_of([*ends, Finished()]) is None


def test_a_saving_is_no_attempt(tmp_path: Any) -> None:
    run = RunDir(tmp_path)
    for folder in (run.attempt(0), run.saving(0), run.attempt(1)):
        folder.path.mkdir(parents=True)
    assert [attempt.path.name for attempt in run.attempts()] == ["000", "001"]
    assert [(one.number, one.only_saves) for one in run.starts()] == [(0, False), (0, True), (1, False)]
    assert run.started({"LAUNCHER_ATTEMPT": "1"}) == run.attempt(1)
    assert run.started({"LAUNCHER_ATTEMPT": "0", "LAUNCHER_ONLY_SAVE": "1"}) == run.saving(0)

"""Find a state in shared memory that no checkpoint has when a run ends, and report whether it was saved."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from launcher.spec.events import (
    CheckpointSaved,
    Event,
    Finished,
    HandedOver,
    HandoverSkipped,
    Resumed,
    SupervisorStarted,
    latest,
)


class UnsavedState(NamedTuple):
    """A state in shared memory (a handover) that no attempt has loaded."""

    attempt: int
    "Attempt that wrote the state."
    step: int


def written_since(folder: Path, moment: float) -> bool:
    """Return whether a file below `folder` is newer than `moment`, in seconds since the epoch."""
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):
            if file.is_file() and file.stat().st_mtime > moment:
                return True
    return False


def unsaved(events: Sequence[Event]) -> UnsavedState | None:
    """Return the handover in shared memory that is newer than every checkpoint."""
    saved = 0
    for event in reversed(events):
        if isinstance(event, CheckpointSaved):
            saved = max(saved, event.step)
        elif isinstance(event, HandedOver):
            return UnsavedState(event.attempt, event.step) if event.step > saved else None
        elif isinstance(event, Resumed | HandoverSkipped | SupervisorStarted):
            return None  # loaded, overwritten, or left by a supervisor that was killed
    return None


class Skipped(NamedTuple):
    """The last complete step, which was not handed over."""

    step: int
    reason: str


def skipped_by(events: Sequence[Event], attempt: int) -> Skipped | None:
    """Return why `attempt` did not hand over its last step. None if it did, or had no step."""
    last = latest(events, HandedOver, HandoverSkipped)
    if not isinstance(last, HandoverSkipped) or last.attempt != attempt:
        return None
    return Skipped(last.step or 0, last.reason)


class Outcome(NamedTuple):
    """Whether the last complete step of an ended run was kept, for `launcher why` and the run's end."""

    step: int
    reason: str
    "Why the step is lost; empty if it is kept."
    checkpoint: int
    "The step of the newest checkpoint, or 0 if there is none."

    def words(self) -> str:
        if not self.reason:
            return f"the state of step {self.step} was written as a checkpoint"
        first = self.checkpoint + 1
        lost = f"step {first} is" if first == self.step else f"steps {first} to {self.step} are"
        return f"{lost} lost: {self.reason}"


def outcome_of(events: Sequence[Event]) -> Outcome | None:
    """Return the outcome recorded by the run's last end, or None if there was no state to keep."""
    last = latest(events, Finished)
    return Outcome(**last.last_state) if last is not None and last.last_state else None

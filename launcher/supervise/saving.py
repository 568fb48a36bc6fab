"""When a run ends, is there a state in shared memory that no checkpoint has? What became of it, in words."""

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
)


class Kept(NamedTuple):
    """A handover that no attempt has taken up."""

    attempt: int
    "Which has written it."
    step: int


def written_since(folder: Path, moment: float) -> bool:
    """Whether a file in there is newer than `moment`, in seconds since the epoch."""
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):
            if file.is_file() and file.stat().st_mtime > moment:
                return True
    return False


def unsaved(events: Sequence[Event]) -> Kept | None:
    """The handover that lies in shared memory and is newer than every checkpoint."""
    saved = 0
    for event in reversed(events):
        if isinstance(event, CheckpointSaved):
            saved = max(saved, event.step)
        elif isinstance(event, HandedOver):
            return Kept(event.attempt, event.step) if event.step > saved else None
        elif isinstance(event, Resumed | HandoverSkipped | SupervisorStarted):
            return None  # taken up, overwritten, or left by a supervisor that was killed
    return None


class Skipped(NamedTuple):
    """A last complete step that was not handed over."""

    step: int
    reason: str


def skipped_by(events: Sequence[Event], attempt: int) -> Skipped | None:
    """None when `attempt` handed over its last step, or had none."""
    last = next(
        (event for event in reversed(events) if isinstance(event, HandedOver | HandoverSkipped)), None
    )
    if not isinstance(last, HandoverSkipped) or last.attempt != attempt:
        return None
    return Skipped(last.step or 0, last.reason)


class Outcome(NamedTuple):
    """What became of the last complete step of a run that has ended. `why` and the run's end tell it."""

    step: int
    reason: str
    "Why it is lost; empty when it is kept."
    checkpoint: int
    "The step of the newest checkpoint, 0 when there is none."

    def words(self) -> str:
        if not self.reason:
            return f"the state of step {self.step} was written as a checkpoint"
        first = self.checkpoint + 1
        lost = f"step {first} is" if first == self.step else f"steps {first} to {self.step} are"
        return f"{lost} lost: {self.reason}"


def outcome_of(events: Sequence[Event]) -> Outcome | None:
    """As the last end of the run tells it; None when there was nothing to keep."""
    last = next((event for event in reversed(events) if isinstance(event, Finished)), None)
    return Outcome(**last.last_state) if last is not None and last.last_state else None

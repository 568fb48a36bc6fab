"""When a run ends, is there a state in shared memory that no checkpoint has? What became of it, in words."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

Event = dict[str, Any]


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
        kind = event.get("event")
        if kind == "checkpoint":
            saved = max(saved, int(event["step"]))
        elif kind == "handover":
            kept = Kept(int(event["attempt"]), int(event["step"]))
            return kept if kept.step > saved else None
        elif kind in ("resumed", "handover-skipped", "started"):
            return None  # taken up, overwritten, or left by a supervisor that was killed
    return None


class Skipped(NamedTuple):
    """A last complete step that was not handed over."""

    step: int
    reason: str


def skipped_by(events: Sequence[Event], attempt: int) -> Skipped | None:
    """None when `attempt` handed over its last step, or had none."""
    told = [e for e in events if e.get("event") in ("handover", "handover-skipped")]
    if not told or told[-1]["event"] == "handover" or told[-1].get("attempt") != attempt:
        return None
    return Skipped(int(told[-1].get("step", 0)), str(told[-1]["reason"]))


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
    ends = [event for event in events if event.get("event") == "finished"]
    told = ends[-1].get("last_state") if ends else None
    return Outcome(**told) if told else None

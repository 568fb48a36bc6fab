"""A submission that RunPod has not answered: its pod may still appear, and must find its run."""

from __future__ import annotations

import time

from launcher.rundir.layout import RunDir
from launcher.rundir.time import seconds_of, stamp
from launcher.schedulers.base import SchedulerError
from launcher.schedulers.runpod.place import handle_of
from launcher.schedulers.runpod.rejected import last_submitting
from launcher.schedulers.runpod.watch import UNANSWERED_SECONDS, pace, waits


def until(run: RunDir) -> str | None:
    """`HH:MM:SS UTC`, up to which a pod that nobody knows may appear; None where none will."""
    if handle_of(run).id is not None:
        return None
    end = (seconds_of(last_submitting(run)["time"]) or 0.0) + UNANSWERED_SECONDS * pace()
    return f"{stamp(end)[11:19]} UTC" if end > time.time() else None


def ended_before_it_began(run: RunDir) -> str:
    """For a person: what a cancellation has done that found the run not running."""
    if waits(run):
        return "cancelled while it waited for another pod"
    began = "went on" if run.attempts() else "began"
    if (time_left := until(run)) is not None:
        return (
            f"cancelled before it {began}; RunPod has named no pod of it: one that still appears "
            f"(until {time_left}) stops by itself"
        )
    if handle_of(run).id is None:
        return f"cancelled before it {began}; it had no pod"
    return f"cancelled before it {began}: its pod was ended"


def refuse_to_forget(run: RunDir) -> None:
    """Raises SchedulerError."""
    if (time_left := until(run)) is not None:
        raise SchedulerError(
            f"{run.id} is kept until {time_left}: RunPod has named no pod of it, and one that still appears "
            f"must find on the volume that it is to stop; run `launcher clean {run.id}` after that"
        )

"""Describe the supervisor's actions, one line per event, for a user who follows the run."""

from __future__ import annotations

from launcher.logs.new_lines import NewLines
from launcher.rundir.layout import RunDir
from launcher.spec.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointFailed,
    CheckpointSaved,
    Climb,
    Downgrade,
    Event,
    HandoverSkipped,
    Probed,
    Requeued,
    Resumed,
    Retry,
    Stopping,
    Waiting,
    read_event,
)

MAX_BYTES = 2**20
"Maximum bytes of events.jsonl to read in one call. A run writes far less between two calls."


class Story:
    """Reads only the new lines of events.jsonl on each call."""

    def __init__(self, run: RunDir, since: str = "") -> None:
        """`since` is a time stamp. Earlier events are left out."""
        self._lines, self._since = NewLines(run.events, MAX_BYTES), since

    def news(self) -> list[str]:
        """Return lines for the events since the last call. Most events need none."""
        events = filter(None, map(read_event, self._lines.read()))
        sentences = (_sentence(event) for event in events if event.time >= self._since)
        return [f"[launcher] {line}" for line in sentences if line]


def _sentence(event: Event) -> str | None:
    match event:
        case AttemptStarted() if event.attempt > 0:
            size, accum = event.recipe["micro_batch_size"], event.recipe["grad_accum"]
            return f"attempt {event.attempt} starts: micro-batch {size} x accumulation {accum}"
        case AttemptEnded() if event.failure != "succeeded":
            return f"attempt {event.attempt} ended: {event.failure}: {event.reason}"
        case Probed() if event.micro_batch_size != event.planned:
            return f"the probe chose micro-batch {event.micro_batch_size} instead of {event.planned}"
        case Downgrade() if event.in_process:
            where = event.phase or "a step"
            where += f" of step {event.step} on rank {event.rank}" if event.step is not None else ""
            return f"out of memory in {where}; continuing with {event.reason} ({event.seconds or 0.0:.1f} s)"
        case Climb():
            return f"back up: {event.reason}"
        case HandoverSkipped():
            return f"no handover: {event.reason}"
        case Downgrade() | Retry():
            return f"trying again: {event.reason}"
        case Resumed() if event.step == 0:
            return "starts again from step 1: no state of earlier steps is left"
        case Resumed():
            place = " from shared memory" if event.from_ == "shared-memory" else ""
            return f"continuing after step {event.step}{place}"
        case Requeued() if event.usd_per_hour is not None:
            return f"another pod: {event.gpu or 'CPU'} in {event.data_center}, {event.usd_per_hour:.3f} USD/h"
        case Waiting():
            return f"waits for another pod: {event.reason.splitlines()[0]}"
        case CheckpointSaved() if event.from_ == "shared-memory":
            return f"the state of step {event.step} in shared memory is a checkpoint now"
        case CheckpointFailed() if event.from_ == "shared-memory":
            return f"the state of step {event.step} could not be saved: {event.reason}"
        case Stopping():
            return f"stopping ({event.reason})"
    return None

"""What the supervisor did, one line per event, for somebody who follows the run."""

from __future__ import annotations

from typing import Any

from launcher.rundir.files import open_regular, parsed
from launcher.rundir.forms import is_event
from launcher.rundir.layout import RunDir


class Story:
    """Reads only the new bytes of events.jsonl at each look."""

    def __init__(self, run: RunDir, since: str = "") -> None:
        """`since`: a time stamp; what happened before is not told."""
        self._path, self._since = run.events, since
        self._offset = 0

    def news(self) -> list[str]:
        """Lines for the events since the last look; most events need none."""
        try:
            with open_regular(self._path) as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        told = (self._tell(line) for line in whole.splitlines())
        return [f"[launcher] {line}" for line in told if line]

    def _tell(self, line: bytes) -> str | None:
        event = parsed(line)
        if not isinstance(event, dict) or not is_event(event):  # torn on a full disk
            return None
        return _sentence(event) if event["time"] >= self._since else None


def _sentence(event: dict[str, Any]) -> str | None:
    kind = event.get("event")
    if kind == "attempt" and event["attempt"] > 0:
        recipe = event["recipe"]
        size, accum = recipe["micro_batch_size"], recipe["grad_accum"]
        return f"attempt {event['attempt']} starts: micro-batch {size} x accumulation {accum}"
    if kind == "ended" and event["failure"] != "succeeded":
        return f"attempt {event['attempt']} ended: {event['failure']}: {event['reason']}"
    if kind == "probe" and event["micro_batch_size"] != event.get("planned"):
        return f"the probe takes micro-batch {event['micro_batch_size']} for {event['planned']}"
    if kind == "downgrade" and event.get("in_process"):
        where = event.get("phase", "a step")
        if event.get("step") is not None:
            where += f" of step {event['step']} on rank {event['rank']}"
        seconds = event.get("seconds") or 0.0
        return f"out of memory in {where}; going on with {event.get('reason')} ({seconds:.1f} s)"
    if kind == "climb":
        return f"back up: {event.get('reason')}"
    if kind == "handover-skipped":
        return f"no handover: {event['reason']}"
    if kind in ("downgrade", "retry"):
        return f"trying again: {event.get('reason')}"
    if kind == "resumed" and event["step"] == 0:
        return "begins again with step 1: nothing is left of the steps before"
    if kind == "resumed":
        place = " from shared memory" if event.get("from") == "shared-memory" else ""
        return f"going on after step {event['step']}{place}"
    if kind == "requeued" and event.get("usd_per_hour") is not None:
        return f"another pod: {event['gpu']} in {event['data_center']}, {event['usd_per_hour']:.3f} USD/h"
    if kind == "waiting":
        return f"waits for another pod: {event['reason'].splitlines()[0]}"
    if kind == "checkpoint" and event.get("from") == "shared-memory":
        return f"the state of step {event['step']} in shared memory is a checkpoint now"
    if kind == "checkpoint-failed" and event.get("from") == "shared-memory":
        return f"the state of step {event['step']} could not be saved: {event['reason']}"
    if kind == "stopping":
        return f"stopping ({event['reason']})"
    return None

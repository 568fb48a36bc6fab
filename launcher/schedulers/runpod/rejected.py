"""A pod that must not go on: ended, or, where that fails, told to stop and ended by a later look."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from launcher.rundir.files import replace_json, replace_text
from launcher.rundir.layout import RunDir
from launcher.rundir.time import now
from launcher.schedulers.base import LIVING, SchedulerError
from launcher.schedulers.runpod.place import Handle

if TYPE_CHECKING:
    from launcher.schedulers.runpod.mirror import Copy


def ask_to_stop(copy: Copy) -> None:
    """Whichever pod has the run or will. Raises VolumeError; then the next look sends it."""
    replace_text(copy.run.cancel, f"{time.time()}\n")
    copy.send()


def keep_rejected(
    copy: Copy, handle: Handle, why: str, usd_per_hour: float | None, limit: float | None
) -> None:
    """One that could not be ended yet: written down, and told to stop."""
    since = last_submitting(copy.run)["time"]  # it costs from then on
    told = {"usd_per_hour": usd_per_hour, "limit": limit, "since": since}
    copy.run.event("rejected", handle=str(handle), reason=why, **told)
    replace_json(copy.run.state, {**copy.run.read_state(), "reason": why, "time": now()})
    with suppress(SchedulerError):
        ask_to_stop(copy)


def last_submitting(run: RunDir) -> dict[str, Any]:
    """The event. Raises IndexError for a run for which no pod was ever asked."""
    return [event for event in run.read_events() if event.get("event") == "submitting"][-1]


def rejected(run: RunDir) -> tuple[Handle, str] | None:
    """One that is still to be ended, and why."""
    for event in reversed(run.read_events()):
        if event.get("event") in ("submitting", "rejected-ended"):
            return None
        if event.get("event") == "rejected":
            _, profile, pod = str(event["handle"]).split(":", 2)
            return Handle(profile, pod), str(event.get("reason", ""))
    return None


def end_rejected(run: RunDir, handle: Handle, why: str, end: Callable[[Handle], None]) -> None:
    """Raises SchedulerError."""
    end(handle)
    run.event("rejected-ended", handle=str(handle))
    state = run.read_state().get("state", "submitted")
    if state in LIVING or state == "cancelled":  # by us, on its pod
        kept = {"state": "failed", "failure": "unknown", "reason": f"{why.split(';')[0]}: its pod was ended"}
        run.event("finished", **kept, by="runpod")
        replace_json(run.state, {**kept, "time": now()})

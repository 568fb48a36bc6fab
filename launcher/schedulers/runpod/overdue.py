"""A pod that is there although its time is over: its image is still pulled, or its start script never ran, or
hangs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from launcher.rundir.layout import RunDir
from launcher.rundir.time import seconds_of
from launcher.schedulers.runpod.offers import lasting
from launcher.schedulers.runpod.rejected import keep_rejected
from launcher.schedulers.runpod.watch import pace

if TYPE_CHECKING:
    from launcher.schedulers.runpod.mirror import Copy
    from launcher.schedulers.runpod.place import Handle

GRACE_SECONDS = 300.0
"For a pod to end itself: 180 s from SIGTERM to SIGKILL, and what a cluster's first pod waits for the others."
_ASKED = ("submitting", "submitted", "resubmitted", "requeued")


def overdue(run: RunDir) -> str | None:
    """Why the run's latest pod may not go on, by the clock alone; None while it may."""
    limit = time_over(run, GRACE_SECONDS * pace())
    return (
        None
        if limit is None
        else f"it is there more than {limit} after its creation (max_hours, or the budget)"
    )


def time_over(run: RunDir, grace: float = 0.0) -> str | None:
    """The limit of the run's latest pod, in words, once it and `grace` seconds have passed."""
    for event in reversed(run.read_events()):
        seconds, since = event.get("seconds"), seconds_of(str(event.get("time", "")))
        if event.get("event") not in _ASKED or not isinstance(seconds, int) or since is None:
            continue
        return lasting(seconds) if time.time() >= since + seconds + grace else None
    return None


def reject_overdue(copy: Copy, handle: Handle) -> bool:
    """Whether its time is over; then it is written down as one to be ended."""
    why = overdue(copy.run)
    if why is None:
        return False
    prices = [event["usd_per_hour"] for event in copy.run.read_events() if event.get("usd_per_hour")]
    keep_rejected(copy, handle, why, prices[-1] if prices else None, None)
    return True

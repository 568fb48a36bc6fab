"""A pod that must not go on: ended, or, where that fails, told to stop and ended by a later look."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from launcher.runs.files import replace_json, replace_text
from launcher.runs.layout import RunDir
from launcher.runs.time import now
from launcher.schedulers.base import LIVING, SchedulerError
from launcher.schedulers.runpod.place import Handle

if TYPE_CHECKING:
    from launcher.schedulers.runpod.api import Client
    from launcher.schedulers.runpod.mirror import Copy


def ask_to_stop(copy: Copy) -> None:
    """Whichever pod has the run or will. Raises VolumeError; then the next look sends it."""
    replace_text(copy.run.cancel, f"{time.time()}\n")
    copy.send()


def keep_rejected(
    copy: Copy, handle: Handle, why: str, usd_per_hour: float | None, limit: float | None
) -> None:
    """One that could not be ended: written down, and told to stop."""
    told = {"usd_per_hour": usd_per_hour, "limit": limit}
    copy.run.event("rejected", handle=str(handle), reason=why, **told)
    replace_json(copy.run.state, {**copy.run.read_state(), "reason": why, "time": now()})
    with suppress(SchedulerError):
        ask_to_stop(copy)


def check_price(copy: Copy, handle: Handle, client: Client) -> bool:
    """Of one that was found by a look: written down, and held against what was asked for. Whether there is
    nothing against it. Raises ApiError."""
    from launcher.schedulers.runpod.create import billed_as, too_dear

    run, which = copy.run, str(handle.id)
    events = [event for event in run.read_events() if event.get("event") == "submitting"]
    limits: dict[str, float] = events[-1].get("limits", {})
    gpu, price = billed_as(client, which, handle.cluster)
    limit = limits.get(gpu, min(limits.values(), default=None))
    since = events[-1]["time"]  # it costs from then on
    run.event("found", handle=str(handle), gpu=gpu, usd_per_hour=price, since=since)
    if (why := too_dear(price, limit)) is None:
        return True
    keep_rejected(copy, handle, why, price, limit)
    return False


def is_priced(run: RunDir, handle: Handle) -> bool:
    return any(
        event.get("usd_per_hour") is not None and event.get("handle") == str(handle)
        for event in run.read_events()
    )


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

"""Compute the time that a run has taken, and its price per hour."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import islice

from launcher.logs.files import attempt_files
from launcher.logs.read import last_stamp
from launcher.rundir.files import read_record
from launcher.rundir.layout import RunDir
from launcher.rundir.progress import newest_lines
from launcher.rundir.time import seconds_of
from launcher.spec.events import (
    AttemptStarted,
    Event,
    Finished,
    Requeued,
    Submitted,
    SupervisorStarted,
    Waiting,
)


def seconds_run(run: RunDir, events: Sequence[Event], now: float, *, ended: bool) -> float | None:
    """Return the total seconds from each start of a supervisor to its end, or None before the first start.

    A killed supervisor has recorded no end, so its time ends when it was last seen alive. If the clock
    was set back meanwhile, it counts as no time.
    """
    total: float | None = None
    begun: float | None = None
    attempt: int | None = None
    last = 0.0
    for event in events:
        moment = seconds_of(event.time) or last
        if begun is not None and is_seen_after_its_end(event):
            total = (total or 0.0) + max(0.0, last_alive(run, attempt, last, moment) - begun)
            begun = None
        match event:
            case SupervisorStarted():
                total, begun, attempt = total or 0.0, moment, None
            case AttemptStarted():
                attempt = event.attempt
            case Finished() if begun is not None:
                total, begun = (total or 0.0) + max(0.0, moment - begun), None
        last = moment
    if begun is None or total is None:
        return total
    return total + max(0.0, (last_alive(run, attempt, last, now) if ended else now) - begun)


def spent(run: RunDir, now: float, *, ended: bool) -> dict[str, float | None]:
    """Return `seconds`, which excludes queueing, and `usd`, their cost at the billed price or the profile's.

    None if it is unknown. `now` is in seconds since the epoch.
    """
    events = run.read_events()
    seconds, per_hour = seconds_run(run, events, now, ended=ended), usd_per_hour(run, events)
    usd = None if seconds is None or per_hour is None else per_hour * seconds / 3600
    return {"seconds": seconds, "usd": usd}


def is_seen_after_its_end(event: Event) -> bool:
    """Return whether an event shows that a supervisor had ended before, perhaps without recording its end."""
    told = isinstance(event, Finished) and event.by is not None
    return told or isinstance(event, Submitted | Requeued | Waiting | SupervisorStarted)


def last_alive(run: RunDir, attempt: int | None, since: float, until: float) -> float:
    """Return when an attempt whose supervisor was killed was last seen alive, in Unix seconds.

    That is the time of its newest line in metrics.jsonl, or in the log or the memory file of rank 0, clamped
    to `since` and `until`. The local copy of a remote run may have only metrics.jsonl.
    """
    if attempt is None:
        return since
    folder = run.attempt(attempt)
    newest = not run.attempt(attempt + 1).path.exists()
    steps = newest_lines(run.metrics) if newest else reversed(run.read_metrics())
    lines = (newest_lines(folder.memory(0)), (step for step in steps if step.get("attempt") == attempt))
    stamps = [line.get("time") for of_file in lines for line in islice(of_file, 1)]
    for file in attempt_files(folder, {0}):
        with contextlib.suppress(OSError):
            stamps.append(last_stamp(file.path))
    seen = [seconds_of(stamp) or since for stamp in stamps if isinstance(stamp, str)]
    return min(until, max([since, *seen]))


def usd_per_hour(run: RunDir, events: Sequence[Event]) -> float | None:
    """Return the price of the newest pod, or else the plan's price, or None if neither is known."""
    prices = [event["usd_per_hour"] for event in events if event.get("usd_per_hour") is not None]
    price = prices[-1] if prices else read_record(run.plan).get("usd_per_hour")
    return float(price) if isinstance(price, int | float) else None

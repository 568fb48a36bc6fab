"""The time that a run has taken, and the price of an hour of it."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.rundir.files import read_record
from launcher.rundir.layout import RunDir
from launcher.rundir.time import seconds_of
from launcher.spec.events import Event, Finished, SupervisorStarted


def seconds_run(events: Sequence[Event], now: float, *, ended: bool) -> float | None:
    """Add up the time from each start of a supervisor to its end; None before the first start."""
    total, begun, last = None, None, 0.0
    for event in events:
        moment = seconds_of(event.time) or last
        if isinstance(event, SupervisorStarted):
            total, begun = (total or 0.0) + (last - begun if begun is not None else 0.0), moment
        elif isinstance(event, Finished) and begun is not None:
            total, begun = (total or 0.0) + moment - begun, None
        last = moment
    if begun is None or total is None:
        return total
    return total + max(0.0, (last if ended else now) - begun)


def usd_per_hour(run: RunDir, events: Sequence[Event]) -> float | None:
    """Return the price of the newest pod, otherwise the plan's; None if neither is known."""
    prices = [event["usd_per_hour"] for event in events if event.get("usd_per_hour") is not None]
    price = prices[-1] if prices else read_record(run.plan).get("usd_per_hour")
    return float(price) if isinstance(price, int | float) else None

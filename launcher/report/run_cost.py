"""Compute the time that a run has taken, and its price."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

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
    Rejected,
    Rental,
    Requeued,
    Submitted,
    SupervisorStarted,
    Waiting,
)


class Paid(NamedTuple):
    """The time and cost of a run so far. None means unknown."""

    seconds: float | None
    "Total seconds from each start of a supervisor to its end; None before the first start."
    usd: float | None
    "Price of these seconds: at the price of the pod of each part, or else at the plan's price."


def paid_for(run: RunDir, events: Sequence[Event], now: float, *, ended: bool) -> Paid:
    """Return the seconds of a run, without time in a queue, and their price."""
    parts = [*_parts(run, events, now, ended=ended)]
    if not parts:
        return Paid(None, None)
    prices, planned = _prices(events), read_record(run.plan).get("usd_per_hour")
    seconds = sum(end - begin for begin, end in parts)
    if not prices and not isinstance(planned, int | float):
        return Paid(seconds, None)
    usd = sum((end - begin) * _price_at(end, prices, planned) / 3600 for begin, end in parts)
    return Paid(seconds, usd)


def _parts(run: RunDir, events: Sequence[Event], now: float, *, ended: bool) -> Iterator[tuple[float, float]]:
    """Yield (start, end) of each supervisor, in Unix seconds.

    A killed supervisor has recorded no end, so the time when it was last seen alive is used. If the clock was
    set back meanwhile, the part has no length.
    """
    started: float | None = None
    attempt: int | None = None
    last = 0.0
    for event in events:
        moment = seconds_of(event.time) or last
        if started is not None and is_seen_after_its_end(event):
            yield started, max(started, last_alive(run, attempt, last, moment))
            started = None
        match event:
            case SupervisorStarted():
                started, attempt = moment, None
            case AttemptStarted():
                attempt = event.attempt
            case Finished() if started is not None:
                yield started, max(started, moment)
                started = None
        last = moment
    if started is not None:
        yield started, max(started, last_alive(run, attempt, last, now) if ended else now)


def _prices(events: Sequence[Event]) -> list[tuple[float, float]]:
    """Return (time in Unix seconds, USD per hour) of each pod that the run was given, in order."""
    return [
        (seconds_of(event.time) or 0.0, event.usd_per_hour)
        for event in events
        if isinstance(event, Rental) and not isinstance(event, Rejected) and event.usd_per_hour is not None
    ]


def _price_at(end: float, prices: Sequence[tuple[float, float]], planned: Any) -> float:
    """Return the price of the newest pod when a supervisor ended, or of the first one if that became known
    later, or else the plan's price."""
    if not prices:
        return float(planned)
    return next((price for moment, price in reversed(prices) if moment <= end), prices[0][1])


def is_seen_after_its_end(event: Event) -> bool:
    """Return whether an event shows that a supervisor had ended before, perhaps without recording its end."""
    is_recorded_later = isinstance(event, Finished) and event.by is not None
    return is_recorded_later or isinstance(event, Submitted | Requeued | Waiting | SupervisorStarted)


def last_alive(run: RunDir, attempt: int | None, since: float, until: float) -> float:
    """Return when an attempt whose supervisor was killed was last seen alive, in Unix seconds.

    That is the time of its newest line in metrics.jsonl, or in the log or the memory file of rank 0, clamped
    to `since` and `until`. The local copy of a remote run may have only metrics.jsonl.
    """
    if attempt is None:
        return since
    folder = run.attempt(attempt)
    newest = not run.attempt(attempt + 1).path.exists()
    steps = newest_lines(run.metrics) if newest else run.metric_lines()
    of_attempt = (step for step in steps if step.get("attempt") == attempt)
    lines = (newest_lines(folder.memory(0)), of_attempt if newest else deque(of_attempt, maxlen=1))
    stamps = [line.get("time") for of_file in lines for line in islice(of_file, 1)]
    for file in attempt_files(folder, {0}):
        with contextlib.suppress(OSError):
            stamps.append(last_stamp(file.path))
    seen = [seconds_of(stamp) or since for stamp in stamps if isinstance(stamp, str)]
    return min(until, max([since, *seen]))

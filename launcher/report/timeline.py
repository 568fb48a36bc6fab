"""The timeline of a run: spans and marks, each with the event it comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from launcher.logs.files import attempt_files
from launcher.logs.read import TEXT_START, offset_of
from launcher.report.history import Turn
from launcher.report.run_cost import is_seen_after_its_end, last_alive
from launcher.rundir.files import open_regular
from launcher.rundir.layout import RunDir
from launcher.rundir.time import seconds_of, stamp
from launcher.spec.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
    Climb,
    Event,
    Finished,
    Probed,
    RecipeChange,
    Requeued,
    Retry,
    Submitted,
    SupervisorStarted,
    Waiting,
)
from launcher.spec.quantities import format_duration

MAX_EVENTS = 400
"Maximum number of events. If there are more, those in the middle are left out."
KINDS = ("queue", "start-up", "attempt", "probe", "lost", "checkpoint", "change", "failure")
"Kinds of spans and marks, in the order of the legend."
_LINES_BEFORE, _LINES_AFTER, _WINDOW = 4, 3, 32 * 1024
_CLOCK = slice(11, 23)
_NOT_SHOWN = frozenset({"time", "event", "recipe", "command", "last_state"})


class Span(NamedTuple):
    """A part of the run's time. `begin` and `end` are in Unix seconds."""

    kind: str
    label: str
    begin: float
    end: float
    event: int
    "Index of the event that it belongs to."


class EventRow(NamedTuple):
    """An event as a row of a table, with lines of the log around it."""

    number: int
    time: str
    kind: str
    text: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Timeline:
    """The timeline of a run, in Unix seconds. A mark is a span of length 0."""

    begin: float
    end: float
    spans: tuple[Span, ...]
    events: tuple[EventRow, ...]
    left_out: int = 0
    "Number of events that are only in events.jsonl."


def timeline_of(
    run: RunDir,
    events: Sequence[Event],
    steps_began: Mapping[int, float],
    turns: Sequence[Turn],
    now: float,
    *,
    ended: bool,
) -> Timeline:
    """Return the timeline of a run's events.

    `steps_began` says when the first step of each attempt began, and `now` is the end of spans that are still
    open, both in Unix seconds. `ended` says whether the run has ended, perhaps without a record of it.
    """
    if not events:
        return Timeline(now, now, (), ())
    times = [seconds_of(event.time) or now for event in events]
    end = max(times) if isinstance(events[-1], Finished) else max(now, *times)
    if ended and not isinstance(events[-1], Finished):
        newest = next((one.attempt for one in reversed(events) if isinstance(one, AttemptStarted)), None)
        end = last_alive(run, newest, max(times), end)
    numbers = _shown(len(events))
    phases = _phases(run, events, times, steps_began, end)
    spans = [*phases, *_lost(events, turns, end), *_marks(events, times)]
    return Timeline(
        begin=min(times),
        end=end,
        spans=tuple(span for span in spans if span.event in numbers),
        events=tuple(_event_row(run, events, number) for number in sorted(numbers)),
        left_out=len(events) - len(numbers),
    )


def _shown(count: int) -> frozenset[int]:
    if count <= MAX_EVENTS:
        return frozenset(range(count))
    return frozenset([*range(MAX_EVENTS // 2), *range(count - MAX_EVENTS // 2, count)])


def _phases(
    run: RunDir,
    events: Sequence[Event],
    times: Sequence[float],
    steps_began: Mapping[int, float],
    end: float,
) -> list[Span]:
    """Return the spans of waiting, start-up and training."""
    spans: list[Span] = []
    waits: tuple[float, int] | None = None
    attempt: tuple[float, int, int] | None = None

    def close(moment: float, before: float | None = None) -> None:
        """Close the attempt's span. `before` is the previous event's time if its end was not recorded."""
        nonlocal attempt
        if attempt is not None:
            begin, number, index = attempt
            if before is not None:
                moment = last_alive(run, number, before, moment)
            moment = max(begin, moment)  # the clock may have been set back
            trains = min(moment, max(begin, steps_began.get(number, moment)))
            spans.append(Span("start-up", f"start-up of attempt {number}", begin, trains, index))
            if trains < moment:
                spans.append(Span("attempt", f"attempt {number}", trains, moment, index))
            attempt = None

    for index, (event, moment) in enumerate(zip(events, times, strict=True)):
        if is_seen_after_its_end(event):
            close(moment, times[index - 1])
        match event:
            case Submitted() | Requeued() | Waiting() if waits is None:
                waits = moment, index
            case SupervisorStarted() if waits is not None:
                spans.append(Span("queue", "waiting to start", waits[0], max(waits[0], moment), waits[1]))
                waits = None
            case AttemptStarted():
                close(moment)
                attempt = moment, event.attempt, index
            case AttemptEnded():
                close(moment)
            case Finished():
                close(moment)
                waits = None  # it has left the queue
    if waits is not None:
        spans.append(Span("queue", "waiting to start", waits[0], end, waits[1]))
    close(end)
    return spans


def _lost(events: Sequence[Event], turns: Sequence[Turn], end: float) -> list[Span]:
    """Return the time lost to each downgrade or restart."""
    spans = []
    for turn in turns:
        if (lost := turn.lost) is None:
            continue
        index = next(number for number, event in enumerate(events) if event is turn.event)
        at = seconds_of(turn.event.time) or end
        before = (seconds_of(turn.before[-1]["time"]) if turn.before else None) or turn.started[0]
        begin = before if turn.restart else at - lost
        label = f"{format_duration(lost)} lost: {turn.event.reason or turn.event.kind}"
        spans.append(Span("lost", label, begin, min(end, begin + lost), index))
    return spans


def _marks(events: Sequence[Event], times: Sequence[float]) -> list[Span]:
    spans = []
    for index, (event, at) in enumerate(zip(events, times, strict=True)):
        match event:
            case Probed():
                label = f"probe: micro-batch {event.micro_batch_size} fits"
                spans.append(Span("probe", label, at - event.seconds, at, index))
            case CheckpointSaved():
                spans.append(Span("checkpoint", f"checkpoint of step {event.step}", at, at, index))
            case RecipeChange():
                what = "back up" if isinstance(event, Climb) else "downgrade"
                spans.append(Span("change", f"{what}: {event.reason or ''}", at, at, index))
            case Retry():
                spans.append(Span("change", f"retry: {event.reason}", at, at, index))
            case AttemptEnded() if event.failure != "succeeded":
                spans.append(Span("failure", f"{event.failure}: {event.reason}", at, at, index))
    return spans


def _event_row(run: RunDir, events: Sequence[Event], number: int) -> EventRow:
    event = events[number]
    return EventRow(number, event.time, event.kind, text_of(event), _lines_around(run, events, number))


def text_of(event: Event) -> str:
    """Return the fields of an event as text."""
    return "; ".join(
        f"{name}: {_short(value)}"
        for name, value in event.as_json().items()
        if name not in _NOT_SHOWN and value not in (None, "")
    )


def _short(value: object, most: int = 300) -> str:
    text = str(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _lines_around(run: RunDir, events: Sequence[Event], number: int) -> tuple[str, ...]:
    """Return lines of the event's rank, or of rank 0, before and after the event."""
    starts = [event for event in events[: number + 1] if isinstance(event, AttemptStarted)]
    if not starts:
        return ()
    rank = events[number].as_json().get("rank")
    rank = rank if isinstance(rank, int) else 0
    moment = events[number].time
    before: list[bytes] = []
    after: list[bytes] = []
    for file in attempt_files(run.attempt(starts[-1].attempt), {rank}):
        try:
            offset = offset_of(file.path, moment.encode())
            with open_regular(file.path) as opened:
                opened.seek(max(0, offset - _WINDOW))
                start = opened.read(min(offset, _WINDOW))
                rest = opened.read(_WINDOW)
        except OSError:
            continue
        before += start.splitlines()[-_LINES_BEFORE:]
        after += rest.splitlines()[:_LINES_AFTER]
    soon = stamp((seconds_of(moment) or 0.0) + 2.0).encode()
    near = sorted(before)[-_LINES_BEFORE:] + sorted(line for line in after if line < soon)[:_LINES_AFTER]
    texts = (
        (line[_CLOCK].decode(errors="replace"), line[TEXT_START:].decode(errors="replace")) for line in near
    )
    return tuple(f"{clock} r{rank:03d} | {_short(text)}" for clock, text in texts)

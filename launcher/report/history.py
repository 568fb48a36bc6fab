"""What became of a run, attempt by attempt: what ran out where, what was tried next, and what it cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from launcher.diagnosis.memory import out_of_memory
from launcher.rundir.files import read_record
from launcher.rundir.layout import RunDir
from launcher.spec.base import format_bytes, format_duration

MAX_LINES = 24
_FIRST_LINES = 4
"That are kept of a longer history; the rest of the room is for what happened last."

Event = dict[str, Any]
Steps = Sequence[dict[str, Any]]
"Lines of metrics.jsonl."


class Turn(NamedTuple):
    """A change of course: a downgrade, a climb or the same recipe again, and the steps around it."""

    event: Event
    attempt: int
    "In which it happened."
    before: Steps
    after: Steps
    "With the recipe that followed, up to the next turn."
    started: tuple[float, float | None]
    "When this attempt and the next one began, in Unix seconds."

    @property
    def restart(self) -> bool:
        return not self.event.get("in_process") and self.event["event"] != "climb"

    @property
    def lost(self) -> float | None:
        """Seconds in which the training did not get on; None while the next attempt has not begun."""
        if not self.restart:
            seconds = self.event.get("seconds")
            return float(seconds) if seconds is not None else None
        begun, again = self.started
        if again is None:
            return None
        if not self.before:
            return again - begun
        if not self.after:
            return again - _seconds(self.before[-1]["time"])
        first = self.after[0]
        repeated = sum(line["seconds"] for line in self.before if line["step"] >= first["step"])
        taken = first["seconds"] + first.get("seconds_lost", 0.0)
        idle = _seconds(first["time"]) - taken - _seconds(self.before[-1]["time"])
        return float(idle + repeated)


def history(run: RunDir) -> list[str]:
    """At most MAX_LINES lines; none for a run in which nothing had to be changed."""
    events = run.read_events()
    turns = turns_of(events, run.read_metrics())
    if not turns:
        return []
    planned = read_record(run.plan)
    lines, later, number, attempt = [_summary(turns)], list[str](), 0, 0
    recipe: dict[str, Any] = {}
    for event in events:
        kind = str(event.get("event"))
        if kind == "attempt":
            attempt, recipe = event["attempt"], event["recipe"]
        elif kind in _TURNS:
            next_recipe = recipe | {name: new for name, (_, new) in event.get("changes", {}).items()}
            lines += _turn(
                turns[number], _what_failed(run, turns[number]), _ratio(planned, recipe, next_recipe)
            )
            number, recipe = number + 1, next_recipe
        elif kind in _TOLD:
            later.append(_TOLD[kind](event, attempt))
        if kind in _TURNS or kind in (
            "probe",
            "resumed",
            "data-changed",
        ):  # a handover stands before the turn it belongs to
            lines, later = lines + later, []
    if len(lines) > MAX_LINES:
        left_out = len(lines) - MAX_LINES + 1
        last = lines[_FIRST_LINES + left_out :]
        lines = [*lines[:_FIRST_LINES], f"  ... {left_out} more in events.jsonl", *last]
    return lines


def turns_of(events: Sequence[Event], metrics: Steps) -> list[Turn]:
    """Every one in the run, in order."""
    started: dict[int, float] = {}
    found: list[tuple[Event, int]] = []
    attempt, stopped = 0, False
    for event in events:
        kind = event.get("event")
        if kind == "attempt":
            attempt = event["attempt"]
            if not (stopped and found and found[-1][1] == attempt - 1):  # what a user waits is not lost
                started[attempt] = _seconds(event["time"])
            stopped = False
        elif kind in _TURNS:
            found.append((event, attempt))
        stopped = stopped or kind == "finished"
    steps: list[list[dict[str, Any]]] = [[] for _ in range(len(found) + 1)]
    for line in metrics:
        steps[sum(_follows(line, event, at) for event, at in found)].append(line)
    turns = []
    for (event, at), (before, after) in zip(found, pairwise(steps), strict=True):
        times = (started.get(at, _seconds(event["time"])), started.get(at + 1))
        turns.append(Turn(event, at, before, after, times))
    return turns


def _follows(line: dict[str, Any], turn: Event, attempt: int) -> bool:
    """Whether the step of this line came after the turn."""
    if line["attempt"] != attempt:
        return bool(line["attempt"] > attempt)
    if not turn.get("in_process") and turn["event"] != "climb":
        return False
    step = turn.get("step")
    return bool(line["step"] >= step if step is not None else line["time"] > turn["time"])


def _summary(turns: Sequence[Turn]) -> str:
    kinds = [
        (
            sum(turn.event["event"] == "downgrade" and not turn.restart for turn in turns),
            "downgrade in process",
            "downgrades in process",
        ),
        (sum(turn.restart for turn in turns), "restart", "restarts"),
        (sum(turn.event["event"] == "climb" for turn in turns), "climb", "climbs"),
    ]
    counted = ", ".join(f"{count} {one if count == 1 else many}" for count, one, many in kinds if count)
    lost = sum(turn.lost or 0.0 for turn in turns)
    return f"history   {counted}: {_span(lost)} lost"


def _turn(turn: Turn, what: str, planned: float | None) -> list[str]:
    where = "in process" if not turn.restart else f"attempt {turn.attempt + 1}"
    if why_not := turn.event.get("why_not_in_process"):
        where += f", not in process: {why_not}"
    parts = [where, str(turn.event.get("reason", ""))]
    if planned is not None:
        parts.append(f"planned {_slower(planned)}")
    if measured := _measured(turn):
        parts.append(measured)
    if (lost := turn.lost) is not None:
        parts.append(f"{_span(lost)} lost")
    return [f"  attempt {turn.attempt}  {what}", f"    -> {'; '.join(parts)}"]


def _what_failed(run: RunDir, turn: Turn) -> str:
    """Of a restart the attempt's verdict knows more than the event."""
    event = turn.event
    if event["event"] == "climb":
        return "room again" + (f" before step {event['step']}" if event.get("step") is not None else "")
    verdict = read_record(run.attempt(turn.attempt).verdict) if turn.restart else {}
    if verdict.get("reason"):
        what, requested = str(verdict["reason"]), (verdict.get("memory") or {}).get("requested")
    else:
        what = "memory ran out" if event["event"] == "downgrade" else "failed"
        what += f" in {event['phase']}" if event.get("phase") else ""
        what += f" of step {event['step']}" if event.get("step") is not None else ""
        what += f" on rank {event['rank']}" if event.get("rank") is not None else ""
        told = out_of_memory(f"OutOfMemoryError: {event.get('because')}")
        requested = told.requested if told is not None else None
    return what + (f", {format_bytes(requested)} asked for" if requested is not None else "")


def _measured(turn: Turn) -> str:
    """Steps per second before and after. The first step of an attempt, or with a recipe, warms up: it is no
    measure."""
    before, after = (
        [line for line in lines if not _warms_up(line, turn)] for lines in (turn.before, turn.after)
    )
    if not before or not after:
        return ""
    was, now = (1 / median(line["seconds"] for line in lines) for lines in (before, after))
    return f"{was:.3g} -> {now:.3g} steps/s, {_slower(now / was)}"


def _warms_up(line: dict[str, Any], turn: Turn) -> bool:
    if "seconds_lost" in line or (not turn.restart and line["step"] == turn.event.get("step")):
        return True
    same = (other["step"] for other in (*turn.before, *turn.after) if other["attempt"] == line["attempt"])
    return bool(line["step"] == min(same))


def _slower(ratio: float) -> str:
    """Of the speed after to the speed before."""
    change = round(abs(1 - ratio) * 100)
    return f"{change} % {'slower' if ratio < 1 else 'faster'}" if change else "as fast"


def _ratio(plan: dict[str, Any], before: dict[str, Any], after: dict[str, Any]) -> float | None:
    """The speed that the plan expects of one recipe, to that of another."""
    rungs = [plan.get("recipe"), *plan.get("ladder", [])]
    speeds = [1.0, *plan.get("ladder_speed", [])]
    if before == after or len(speeds) != len(rungs) or before not in rungs or after not in rungs:
        return None
    return float(speeds[rungs.index(after)] / speeds[rungs.index(before)])


def _probe(event: Event, attempt: int) -> str:
    size, planned = event["micro_batch_size"], event.get("planned")
    as_planned = "as planned" if planned in (None, size) else f"planned {planned}"
    effort = f"{event.get('asked', 1)} tried, {_span(event['seconds'])}"
    return f"  attempt {attempt}  probe: micro-batch {size} fits, {as_planned} ({effort})"


def _handover(event: Event, _attempt: int) -> str:
    return f"    handed over in shared memory: step {event['step']}, {format_bytes(event['bytes'])}"


def _handover_skipped(event: Event, _attempt: int) -> str:
    return f"    no handover: {event['reason']}"


def _data_changed(event: Event, _attempt: int) -> str:
    return f"    {event['reason']}"


def _resumed(event: Event, attempt: int) -> str:
    source = str(event.get("from", "checkpoint")).replace("-", " ")
    if event["step"] == 0:
        return f"    attempt {attempt} begins again with step 1: nothing is left of the steps before"
    return f"    attempt {attempt} goes on after step {event['step']}, from {source}"


_TURNS = ("downgrade", "climb", "retry")
_TOLD: dict[str, Callable[[Event, int], str]] = {
    "probe": _probe,
    "handover": _handover,
    "handover-skipped": _handover_skipped,
    "resumed": _resumed,
    "data-changed": _data_changed,
}


def _span(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 10 else format_duration(seconds)


def _seconds(stamp: str) -> float:
    """Of `2026-11-21T08:54:01.123456Z` since 1970."""
    return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()

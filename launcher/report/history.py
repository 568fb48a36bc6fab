"""The history of a run by attempt: where memory ran out, what was tried next, and the time lost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from launcher.diagnosis.memory import out_of_memory
from launcher.rundir.files import read_record
from launcher.rundir.layout import RunDir
from launcher.rundir.recipe_changes import new_values
from launcher.spec.events import (
    AttemptStarted,
    Climb,
    DataChanged,
    Downgrade,
    Event,
    Finished,
    HandedOver,
    HandoverSkipped,
    Probed,
    RecipeChange,
    Resumed,
    Retry,
)
from launcher.spec.quantities import format_bytes, format_duration

MAX_LINES = 24
_FIRST_LINES = 4
"Lines kept from the beginning of a longer history. The other lines are the latest ones."

Steps = Sequence[dict[str, Any]]
"Lines of metrics.jsonl, without the metrics to save memory: a long run has millions of lines."
_OF_STEP = ("time", "attempt", "step", "seconds", "seconds_lost")


class Turn(NamedTuple):
    """A downgrade, a climb or a retry with the same recipe, and the steps around it."""

    event: RecipeChange | Retry
    attempt: int
    "Number of the attempt in which it happened."
    before: Steps
    after: Steps
    "Steps with the recipe that followed, up to the next turn."
    started: tuple[float, float | None]
    "When this attempt and the next one started, in Unix seconds."

    @property
    def restart(self) -> bool:
        return not (_in_process(self.event) or isinstance(self.event, Climb))

    @property
    def lost(self) -> float | None:
        """Seconds without training progress, or None until the next attempt has started."""
        if not self.restart:
            return self.event.seconds if isinstance(self.event, RecipeChange) else None
        this_start, next_start = self.started
        if next_start is None:
            return None
        if not self.before:
            return max(0.0, next_start - this_start)
        if not self.after:
            return max(0.0, next_start - _seconds(self.before[-1]["time"]))
        first = self.after[0]
        repeated = sum(line["seconds"] for line in self.before if line["step"] >= first["step"])
        taken = first["seconds"] + first.get("seconds_lost", 0.0)
        idle = _seconds(first["time"]) - taken - _seconds(self.before[-1]["time"])
        return float(max(0.0, idle) + repeated)


def history(run: RunDir) -> list[str]:
    """Return the history in at most MAX_LINES lines, or [] if nothing had to be changed in the run."""
    events = run.read_events()
    if not any(isinstance(event, RecipeChange | Retry) for event in events):
        return []
    return history_lines(run, events, turns_of(events, run.metric_lines()))


def history_lines(run: RunDir, events: Sequence[Event], turns: Sequence[Turn]) -> list[str]:
    """Return the same as `history`, from events and turns that were already read."""
    if not turns:
        return []
    planned = read_record(run.plan)
    lines, later, number, attempt = [_summary(turns)], list[str](), 0, 0
    recipe: dict[str, Any] = {}
    for event in events:
        if isinstance(event, AttemptStarted):
            attempt, recipe = event.attempt, event.recipe
        elif isinstance(event, RecipeChange | Retry):
            next_recipe = recipe | (new_values(event) if isinstance(event, RecipeChange) else {})
            lines += _turn(
                turns[number], _what_failed(run, turns[number]), _ratio(planned, recipe, next_recipe)
            )
            number, recipe = number + 1, next_recipe
        elif (sentence := _line_of(event, attempt)) is not None:
            later.append(sentence)
        # A handover is recorded before the turn to which it belongs.
        if isinstance(event, RecipeChange | Retry | Probed | Resumed | DataChanged):
            lines, later = lines + later, []
    if len(lines) > MAX_LINES:
        left_out = len(lines) - MAX_LINES + 1
        last = lines[_FIRST_LINES + left_out :]
        lines = [*lines[:_FIRST_LINES], f"  ... {left_out} more in events.jsonl", *last]
    return lines


def turns_of(events: Sequence[Event], metrics: Iterable[dict[str, Any]]) -> list[Turn]:
    """Return every turn of the run, in order."""
    started: dict[int, float] = {}
    turn_events: list[tuple[RecipeChange | Retry, int]] = []
    attempt, stopped = 0, False
    for event in events:
        if isinstance(event, AttemptStarted):
            attempt = event.attempt
            # A user's pause is not lost time.
            if not (stopped and turn_events and turn_events[-1][1] == attempt - 1):
                started[attempt] = _seconds(event.time)
            stopped = False
        elif isinstance(event, RecipeChange | Retry):
            turn_events.append((event, attempt))
        stopped = stopped or isinstance(event, Finished)
    steps: list[list[dict[str, Any]]] = [[] for _ in range(len(turn_events) + 1)]
    for line in metrics if turn_events else ():
        fields = {name: line[name] for name in _OF_STEP if name in line}
        steps[sum(_follows(line, event, at) for event, at in turn_events)].append(fields)
    turns = []
    for (event, at), (before, after) in zip(turn_events, pairwise(steps), strict=True):
        times = (started.get(at, _seconds(event.time)), started.get(at + 1))
        turns.append(Turn(event, at, before, after, times))
    return turns


def _in_process(turn: RecipeChange | Retry) -> bool:
    return isinstance(turn, RecipeChange) and bool(turn.in_process)


def _follows(line: dict[str, Any], turn: RecipeChange | Retry, attempt: int) -> bool:
    """Return whether the step of this line came after the turn."""
    if line["attempt"] != attempt:
        return bool(line["attempt"] > attempt)
    if not (_in_process(turn) or isinstance(turn, Climb)):
        return False
    step = turn.step if isinstance(turn, RecipeChange) else None
    return bool(line["step"] >= step if step is not None else line["time"] > turn.time)


def _summary(turns: Sequence[Turn]) -> str:
    kinds = [
        (
            sum(isinstance(turn.event, Downgrade) and not turn.restart for turn in turns),
            "downgrade in process",
            "downgrades in process",
        ),
        (sum(turn.restart for turn in turns), "restart", "restarts"),
        (sum(isinstance(turn.event, Climb) for turn in turns), "climb", "climbs"),
    ]
    counted = ", ".join(f"{count} {one if count == 1 else many}" for count, one, many in kinds if count)
    lost = sum(turn.lost or 0.0 for turn in turns)
    return f"history   {counted}: {_span(lost)} lost"


def _turn(turn: Turn, what: str, planned: float | None) -> list[str]:
    where = "in process" if not turn.restart else f"attempt {turn.attempt + 1}"
    if isinstance(turn.event, RecipeChange) and turn.event.why_not_in_process:
        where += f", not in process: {turn.event.why_not_in_process}"
    parts = [where, turn.event.reason or ""]
    if planned is not None:
        parts.append(f"planned {_slower(planned)}")
    if measured := _measured(turn):
        parts.append(measured)
    if (lost := turn.lost) is not None:
        parts.append(f"{_span(lost)} lost")
    return [f"  attempt {turn.attempt}  {what}", f"    -> {'; '.join(parts)}"]


def _what_failed(run: RunDir, turn: Turn) -> str:
    """Describe what failed before the turn. At a restart, the verdict has more detail than the event."""
    event = turn.event
    if isinstance(event, Climb):
        return "room again" + (f" before step {event.step}" if event.step is not None else "")
    judged = run.attempt(turn.attempt).read_verdict() if turn.restart else None
    if judged is not None and judged.verdict.reason:
        memory = judged.verdict.memory
        what, requested = judged.verdict.reason, memory.requested if memory is not None else None
    elif isinstance(event, RecipeChange):
        what = "memory ran out"
        what += f" in {event.phase}" if event.phase else ""
        what += f" of step {event.step}" if event.step is not None else ""
        what += f" on rank {event.rank}" if event.rank is not None else ""
        oom = out_of_memory(f"OutOfMemoryError: {event.because}")
        requested = oom.requested if oom is not None else None
    else:
        what, requested = "failed", None
    return what + (f", {format_bytes(requested)} requested" if requested is not None else "")


def _measured(turn: Turn) -> str:
    """Return the steps per second before and after.

    The first step of an attempt or a recipe is a warm-up and is left out, and so are lines without seconds,
    which come from frameworks' logs without times.
    """
    first: dict[int, int] = {}
    for line in (*turn.before, *turn.after):
        first[line["attempt"]] = min(line["step"], first.get(line["attempt"], line["step"]))
    before, after = (
        [line for line in lines if line["seconds"] and not _warms_up(line, turn, first[line["attempt"]])]
        for lines in (turn.before, turn.after)
    )
    if not before or not after:
        return ""
    was, now = (1 / median(line["seconds"] for line in lines) for lines in (before, after))
    return f"{was:.3g} -> {now:.3g} steps/s, {_slower(now / was)}"


def _warms_up(line: dict[str, Any], turn: Turn, first: int) -> bool:
    """Return whether the step of this line is a warm-up. `first` is the first step of its attempt."""
    step = turn.event.step if isinstance(turn.event, RecipeChange) else None
    if "seconds_lost" in line or (not turn.restart and line["step"] == step):
        return True
    return bool(line["step"] == first)


def _slower(ratio: float) -> str:
    """Describe the ratio of the speed after to the speed before."""
    change = round(abs(1 - ratio) * 100)
    return f"{change} % {'slower' if ratio < 1 else 'faster'}" if change else "as fast"


def _ratio(plan: dict[str, Any], before: dict[str, Any], after: dict[str, Any]) -> float | None:
    """Return the planned speed of `after` relative to `before`, or None if unknown."""
    rungs = [plan.get("recipe"), *plan.get("ladder", [])]
    speeds = [1.0, *plan.get("ladder_speed", [])]
    if before == after or len(speeds) != len(rungs) or before not in rungs or after not in rungs:
        return None
    return float(speeds[rungs.index(after)] / speeds[rungs.index(before)])


def _line_of(event: Event, attempt: int) -> str | None:
    """Return the line for an event that is not a turn, or None if it needs none."""
    match event:
        case Probed():
            size = event.micro_batch_size
            planned = "as planned" if event.planned in (None, size) else f"planned {event.planned}"
            tried = 1 if event.asked is None else event.asked
            effort = f"{tried} tried, {_span(event.seconds)}"
            return f"  attempt {attempt}  probe: micro-batch {size} fits, {planned} ({effort})"
        case HandedOver():
            return f"    handed over in shared memory: step {event.step}, {format_bytes(event.bytes)}"
        case HandoverSkipped():
            return f"    no handover: {event.reason}"
        case DataChanged():
            return f"    {event.reason}"
        case Resumed() if event.step == 0:
            return f"    attempt {attempt} starts again from step 1: no state of earlier steps is left"
        case Resumed():
            source = (event.from_ or "checkpoint").replace("-", " ")
            return f"    attempt {attempt} continues after step {event.step}, from {source}"
    return None


def _span(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 10 else format_duration(seconds)


def _seconds(stamp: str) -> float:
    """Return the Unix seconds of a time stamp such as `2026-11-21T08:54:01.123456Z`."""
    return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()

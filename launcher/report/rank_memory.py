"""Read the memory of every rank over time from `attempts/*/memory/`, thinned out while reading."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from launcher.report.steps import number
from launcher.report.thinned_series import ends, extremes, parts_of
from launcher.rundir.files import open_regular
from launcher.rundir.layout import AttemptDir, RunDir
from launcher.rundir.time import seconds_of

MEASURES = {
    "peak": "memory of tensors, peak of each step",
    "reserved": "memory held by PyTorch's allocator",
    "used": "GPU memory of the rank's processes",
    "rss": "host memory of the rank",
}
MAX_RANKS = 128
"Maximum number of ranks to draw. If there are more, ranks at equal distances are chosen."
_NAME = re.compile(r"rank-(\d+)\.jsonl")


class Highest(NamedTuple):
    """The highest value of one measure."""

    bytes: float
    rank: int
    step: int
    attempt: int


@dataclass(frozen=True)
class RankMemory:
    """Bytes over time. Each rank's values have the length of `seconds`, with None between attempts."""

    seconds: tuple[float, ...] = ()
    "Time since the first attempt started."
    ranks: tuple[int, ...] = ()
    values: dict[str, tuple[tuple[float | None, ...], ...]] = field(default_factory=dict)
    "Measure -> the values of each rank."
    highest: dict[str, Highest] = field(default_factory=dict)
    all_ranks: int = 0
    "Number of ranks that recorded their memory."
    of_steps: bool = True
    "Whether there is a value per step. For a `command:` there are samples instead, about one per second."


def read_rank_memory(run: RunDir, began: float) -> RankMemory:
    """Read every attempt. `began` is when the first attempt started, in Unix seconds."""
    attempts = [(attempt, files) for attempt in run.attempts() if (files := _files(attempt))]
    all_ranks = sorted({rank for _, files in attempts for rank in files})
    ranks = all_ranks[:: -(-len(all_ranks) // MAX_RANKS)] if all_ranks else []
    clocks = [_clock(files) for _, files in attempts]
    rows = sum(map(len, clocks))
    most = max(40, min(500, 16_000 // max(len(ranks), 1)))
    seconds: list[float] = []
    columns: dict[str, list[list[float | None]]] = {}
    highest: dict[str, Highest] = {}
    for (attempt, files), clock in zip(attempts, clocks, strict=True):
        if not clock:
            continue
        parts = parts_of(len(clock), most if rows > 2 * most else len(clock))
        points = [time - began for time in ends([time for _, time in clock], parts) if time is not None]
        before = len(seconds)
        seconds += [round(point, 1) for point in points]
        firsts = [clock[part.start][0] for part in parts]
        single = len(parts[0]) == 1
        for place, rank in enumerate(ranks):
            measures = _read(files[rank], firsts, single) if rank in files else {}
            for name, (values, top, step) in measures.items():
                column = columns.setdefault(name, [[] for _ in ranks])[place]
                column += [None] * (before - len(column)) + values
                if name not in highest or top > highest[name].bytes:
                    highest[name] = Highest(top, rank, step, attempt.number)
        seconds.append(seconds[-1])  # a point without values, so that no line joins two attempts
    for column in (column for of_ranks in columns.values() for column in of_ranks):
        column += [None] * (len(seconds) - len(column))
    return RankMemory(
        tuple(seconds),
        tuple(ranks),
        {name: tuple(map(tuple, columns[name])) for name in MEASURES if name in columns},
        highest,
        len(all_ranks),
        of_steps=run.read_about().job.task is not None,
    )


def peak_of_first_rank(run: RunDir) -> float | None:
    """Return rank 0's peak memory in bytes, of its GPU or else of its processes; None if not recorded."""
    highest: dict[str, float] = {}
    for attempt in run.attempts():
        for line in _lines(attempt.memory(0)):
            for name in MEASURES:
                if (value := number(line.get(name))) is not None:
                    highest[name] = max(value, highest.get(name, value))
    return next((highest[name] for name in MEASURES if name in highest), None)


def _files(attempt: AttemptDir) -> dict[int, Path]:
    """Return rank -> its file."""
    with contextlib.suppress(OSError):
        names = ((_NAME.fullmatch(entry.name), entry) for entry in (attempt.path / "memory").iterdir())
        return {int(match[1]): entry for match, entry in names if match is not None}
    return {}


def _clock(files: dict[int, Path]) -> list[tuple[int, float]]:
    """Return (step, time) of each line of the first rank. All ranks have the same steps."""
    clock: list[tuple[int, float]] = []
    for line in _lines(files[min(files)]):
        time = seconds_of(line["time"]) if isinstance(line.get("time"), str) else None
        if time is not None and (not clock or line["step"] > clock[-1][0]):
            clock.append((line["step"], time))
    return clock


class _Read(NamedTuple):
    """One measure of one rank in one attempt."""

    values: list[float | None]
    highest: float
    step: int
    "The step with the highest value."


def _read(path: Path, firsts: list[int], single: bool) -> dict[str, _Read]:
    """Read a rank's values in the parts of the attempt that begin with the steps `firsts`."""
    width = 1 if single else 2
    columns: dict[str, list[float | None]] = {name: [None] * (width * len(firsts)) for name in MEASURES}
    tops: dict[str, tuple[float, int]] = {}
    held: dict[str, list[float | None]] = {name: [] for name in MEASURES}
    steps: list[int] = []

    def close(part: int) -> None:
        for name, raw in held.items():
            values = [number(value) for value in raw] if part >= 0 else []
            raw.clear()
            known = [value for value in values if value is not None]
            if known:
                drawn = known[-1:] if single else extremes(known)
                columns[name][width * part : width * part + width] = drawn
                if name not in tops or max(known) > tops[name][0]:
                    tops[name] = max(known), steps[values.index(max(known))]
        steps.clear()

    part, until = -1, firsts[0]
    for line in _lines(path):  # a large run has millions of lines, so do as little as possible per line
        step = line["step"]
        if step >= until:
            close(part)
            part = bisect_right(firsts, step) - 1
            until = firsts[part + 1] if part + 1 < len(firsts) else sys.maxsize
        steps.append(step)
        for name, raw in held.items():
            raw.append(line.get(name))
    close(part)
    return {name: _Read(columns[name], *top) for name, top in tops.items()}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines that have a step, or nothing if the file cannot be read.

    For a `command:`, the number of the sample is used as the step.
    """
    with contextlib.suppress(OSError), open_regular(path) as file:
        for text in file:
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                continue
            if isinstance(line, dict) and type(step := line.get("step", line.get("sample"))) is int:
                line["step"] = step
                yield line

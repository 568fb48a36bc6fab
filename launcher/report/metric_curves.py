"""The curves of a run: every number in metrics.jsonl over steps, tokens and time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from launcher.report.thin import ends, is_gap, parts_of, parts_with_gaps, thinned
from launcher.rundir.time import seconds_of

PARTS = 1000
"Maximum number of parts of a curve. A longer run is drawn with the extremes of each part."
FIRST = ("loss", "lr", "grad_norm", "tokens_per_second", "samples_per_second", "mfu")
"Metrics that are drawn first, in this order."
TITLES = {
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_second": "tokens per second",
    "samples_per_second": "samples per second",
    "mfu": "MFU",
}
_BOOKKEEPING = frozenset(
    {"time", "attempt", "step", "steps", "weight", "samples", "tokens", "seconds", "seconds_lost"}
)


class Chart(NamedTuple):
    """Metrics that share axes: a training metric, and the same metric of evaluations (`eval_...`)."""

    title: str
    columns: tuple[str, ...]


@dataclass(frozen=True)
class Curves:
    """The steps of a run as columns of equal length."""

    step: tuple[float, ...] = ()
    tokens: tuple[float, ...] = ()
    "Tokens of all steps so far; empty if the run does not count tokens."
    seconds: tuple[float, ...] = ()
    "Time since the first attempt started."
    columns: dict[str, tuple[float | None, ...]] = field(default_factory=dict)
    "Values of each metric: None if a step lacks the metric, NaN if the value is not a finite number."
    rows: int = 0
    "Number of steps before thinning."
    parts: int = 0
    "Number of parts whose extremes are drawn."

    @property
    def charts(self) -> list[Chart]:
        """The charts of a page, in order. If there are tokens per second, samples per second are left out."""
        return charts_of(self.columns)

    def as_data(self, label: str) -> dict[str, Any]:
        """Return the data for charts.js: null if there is no value, "nan" if the line has a gap."""
        return {
            "label": label,
            "x": {"step": self.step, "tokens": self.tokens, "seconds": self.seconds},
            "columns": {
                name: ["nan" if is_gap(value) else value for value in _widened(column)]
                for name, column in self.columns.items()
            },
        }


@dataclass(frozen=True)
class Totals:
    """Totals over all steps. None means unknown."""

    steps: int = 0
    "The last step."
    tokens: float | None = None
    training: float = 0.0
    "Total seconds of all steps that count."
    speed: float | None = None
    "Median tokens per second, or else samples per second."
    speed_of: str = ""
    "Name of the metric in `speed`."
    mfu: float | None = None
    "Median MFU."
    last: dict[str, float | None] = field(default_factory=dict)
    "Metric -> its last value; None if that is not a finite number."
    low: dict[str, float] = field(default_factory=dict)
    high: dict[str, float] = field(default_factory=dict)
    peak: float | None = None
    "Highest memory of rank 0 in bytes: of its GPU, or else of the process."


def steps_that_count(metrics: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one line for each step, without steps that a later attempt repeated.

    Lines of the same step and attempt, such as of training and evaluation, are merged.
    """
    kept: list[dict[str, Any]] = []
    for line in metrics:
        if kept and _same_step(kept[-1], line):
            line = {**kept[-1], **line, "seconds": kept[-1]["seconds"] + line["seconds"]}
        while kept and kept[-1]["step"] >= line["step"]:
            kept.pop()
        kept.append(line)
    return kept


def curves_of(lines: Sequence[dict[str, Any]], began: float, most: int = PARTS) -> Curves:
    """Return the curves of the steps that count, in at most `most` parts.

    `began` is when the first attempt started, in Unix seconds.
    """
    if not lines:
        return Curves()
    names = dict.fromkeys(name for line in lines for name in line if not _skipped(name))
    columns = {name: [_drawn(line, name) for line in lines] for name in names}
    parts = parts_of(len(lines), most)
    gaps = parts_with_gaps(list(columns.values()), parts)
    tokens = _tokens(lines)
    seconds = [(seconds_of(line["time"]) or began) - began for line in lines]
    return Curves(
        step=_whole(ends([float(line["step"]) for line in lines], parts, gaps)),
        tokens=() if tokens is None else _whole(ends(tokens, parts, gaps)),
        seconds=_whole(ends(seconds, parts, gaps)),
        columns={
            name: tuple(map(_rounded, thinned(column, parts, gaps)))
            for name, column in columns.items()
            if not all(value is None or is_gap(value) for value in column)
        },
        rows=len(lines),
        parts=len(parts),
    )


def totals_of(lines: Sequence[dict[str, Any]]) -> Totals:
    """Return the totals over the steps that count."""
    if not lines:
        return Totals()
    values: dict[str, list[float]] = {}
    last: dict[str, float | None] = {}
    for line in lines:
        for name, value in line.items():
            if _skipped(name):
                continue
            last[name] = known = number(value)
            if known is not None:
                values.setdefault(name, []).append(known)
    speed = next((name for name in ("tokens_per_second", "samples_per_second") if name in values), "")
    tokens = _tokens(lines)
    return Totals(
        steps=lines[-1]["step"],
        tokens=None if tokens is None else tokens[-1],
        training=sum(line["seconds"] for line in lines),
        speed=median(values[speed]) if speed else None,
        speed_of=speed,
        mfu=median(values["mfu"]) if "mfu" in values else None,
        last={name: last[name] for name in values},
        low={name: min(column) for name, column in values.items()},
        high={name: max(column) for name, column in values.items()},
        peak=_peak(lines, "memory_peak") or _peak(lines, "memory_rss"),
    )


def charts_of(names: Sequence[str] | dict[str, Any]) -> list[Chart]:
    """Return the charts for metrics of these names, in order."""
    bases = list(dict.fromkeys(name.removeprefix("eval_") for name in names))
    if "tokens_per_second" in bases and "samples_per_second" in bases:
        bases.remove("samples_per_second")
    ordered = [base for base in FIRST if base in bases] + sorted(set(bases) - {*FIRST})
    return [
        Chart(TITLES.get(base, base), tuple(name for name in (base, f"eval_{base}") if name in names))
        for base in ordered
    ]


def number(value: object) -> float | None:
    """Return a finite number as float, and None for everything else that a line may contain."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _drawn(line: dict[str, Any], name: str) -> float | None:
    """Return a metric of a step: NaN if it is not a finite number, None if it is missing or text."""
    value = line.get(name, "")
    if isinstance(value, str | bool | list | dict):
        return None
    return math.nan if (known := number(value)) is None else known


def _widened(values: Sequence[float | None]) -> list[float | None]:
    """Extend each gap over the missing values next to it, so that no line begins there."""
    found = list(values)
    for rows in (range(1, len(found)), range(len(found) - 2, -1, -1)):
        for row in rows:
            if found[row] is None and is_gap(found[row - rows.step]):
                found[row] = math.nan
    return found


def _same_step(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two lines belong to the same step of the same attempt."""
    return (one.get("attempt"), one.get("step")) == (other.get("attempt"), other.get("step"))


def _skipped(name: str) -> bool:
    return name in _BOOKKEEPING or name.startswith("memory_")


def _tokens(lines: Sequence[dict[str, Any]]) -> list[float] | None:
    """Return the cumulative tokens at each step. The built-in entrypoint logs tokens as `weight`."""
    found, total = [], 0.0
    for line in lines:
        counted = line.get("tokens", line.get("weight") if "tokens_per_second" in line else None)
        total += number(counted) or 0.0
        found.append(total)
    return found if total else None


def _peak(lines: Sequence[dict[str, Any]], name: str) -> float | None:
    return max((value for line in lines if (value := number(line.get(name))) is not None), default=None)


def _rounded(value: float | None) -> float | None:
    """Round to six digits, which is more than a chart shows."""
    return None if value is None else float(f"{value:.6g}")


def _whole(values: Sequence[float | None]) -> tuple[float, ...]:
    return tuple(round(value, 1) for value in values if value is not None)

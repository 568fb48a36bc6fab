"""The curves of a run: every number in metrics.jsonl over steps, tokens and time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from launcher.report.steps import Steps, number
from launcher.report.thinned_series import ends, is_gap, parts_of, parts_with_gaps, thinned

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


def curves_of(steps: Steps, began: float, most: int = PARTS) -> Curves:
    """Return the curves of the steps that count, in at most `most` parts.

    `began` is when the first attempt started, in Unix seconds.
    """
    if not len(steps):
        return Curves()
    rows, metrics = len(steps), steps.metrics()
    parts = parts_of(rows, most)
    gaps = parts_with_gaps((column.over(rows) for column in metrics.values()), parts)
    tokens = steps.tokens()
    seconds = [0.0 if math.isnan(time) else time - began for time in steps.time]
    return Curves(
        step=_whole(ends(steps.step, parts, gaps)),
        tokens=() if tokens is None else _whole(ends(tokens, parts, gaps)),
        seconds=_whole(ends(seconds, parts, gaps)),
        columns={
            name: tuple(map(_rounded, thinned(column.over(rows), parts, gaps)))
            for name, column in metrics.items()
        },
        rows=rows,
        parts=len(parts),
    )


def totals_of(steps: Steps) -> Totals:
    """Return the totals over the steps that count."""
    if not len(steps):
        return Totals()
    metrics = steps.metrics()
    speed = next((name for name in ("tokens_per_second", "samples_per_second") if name in metrics), "")
    tokens = steps.tokens()
    return Totals(
        steps=int(steps.step[-1]),
        tokens=None if tokens is None else tokens[-1],
        training=sum(steps.seconds),
        speed=median(metrics[speed].finite()) if speed else None,
        speed_of=speed,
        mfu=median(metrics["mfu"].finite()) if "mfu" in metrics else None,
        last={name: number(column.last) for name, column in metrics.items()},
        low={name: min(column.finite()) for name, column in metrics.items()},
        high={name: max(column.finite()) for name, column in metrics.items()},
        peak=steps.peak(),
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


def _widened(values: Sequence[float | None]) -> list[float | None]:
    """Extend each gap over the missing values next to it, so that no line begins there."""
    widened = list(values)
    for rows in (range(1, len(widened)), range(len(widened) - 2, -1, -1)):
        for row in rows:
            if widened[row] is None and is_gap(widened[row - rows.step]):
                widened[row] = math.nan
    return widened


def _rounded(value: float | None) -> float | None:
    """Round to six digits, which is more than a chart shows."""
    return None if value is None else float(f"{value:.6g}")


def _whole(values: Sequence[float | None]) -> tuple[float, ...]:
    return tuple(round(value, 1) for value in values if value is not None)

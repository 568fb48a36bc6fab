"""Compare several runs: their differing settings and their results, as plain values."""

from __future__ import annotations

import json
import math
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from launcher.report.metric_curves import Curves, Totals, curves_of, totals_of
from launcher.report.rank_memory import peak_of_first_rank
from launcher.report.run_cost import paid_for
from launcher.report.run_report import first_start, recipe_now
from launcher.report.steps import Steps
from launcher.rundir.layout import RunDir
from launcher.spec.errors import UsageError

if TYPE_CHECKING:
    from launcher.schedulers.base import Status

MAX_AXES = 8
"Maximum number of settings drawn as parallel axes."
POINTS = 8000
"Maximum number of curve points on a page, over all runs."
_LOWER_IS_BETTER = re.compile(
    r"loss|error|perplexity|grad_norm|bits_per_"
    r"|(?<![a-z])(seconds|usd|memory|mae|mape|mse|rmse|wer|cer|ppl|nll|fid|bpb|bpc)(?![a-z])"
)
"Names of losses and errors. `norm` alone is not in it: for the accuracy `acc_norm`, higher is better."
_NOT_COMPARED = frozenset({"name", "recipe", "workdir", "tags"})
"Fields of the job that do not affect training, and its requested recipe: the recipe that ran is compared."
RESULTS = ("step", "tokens", "seconds", "usd", "peak_memory")
"Results besides the metrics. Memory is in bytes of rank 0; seconds include restarts but not the queue."


@dataclass(frozen=True)
class ComparedRun:
    """The settings and results of a run."""

    run: str
    state: str
    settings: dict[str, Any]
    "Setting -> value, such as `train.lr`, `recipe.sharding`, `profile` or `versions.torch`."
    results: dict[str, float]
    "The last value of each training metric, the best value of each evaluation metric, and `RESULTS`."
    curves: Curves


@dataclass(frozen=True)
class Comparison:
    """Compared runs, the best first."""

    runs: tuple[ComparedRun, ...]
    differing: tuple[str, ...]
    "Settings that differ between the runs."
    results: tuple[str, ...]
    by: str
    "Setting or result by which the runs are sorted; empty if they are in the order in which they were named."

    def value(self, run: ComparedRun, name: str) -> Any:
        """Return a setting or a result, or None if the run lacks it."""
        return run.settings.get(name, run.results.get(name))

    def rows(self) -> list[dict[str, Any]]:
        """Return one mapping per run: `run`, `state`, the differing settings and the results."""
        names = (*self.differing, *self.results)
        return [
            {"run": run.run, "state": run.state, **{name: self.value(run, name) for name in names}}
            for run in self.runs
        ]


def lower_is_better(name: str) -> bool:
    """Return whether lower values of a result are better."""
    return _LOWER_IS_BETTER.search(name.lower()) is not None


def comparison_of(states: Mapping[RunDir, Status], by: str | None = None) -> Comparison:
    """Compare runs, sorted by a result or a setting. Raises UsageError if no run has it."""
    runs = [_compared(run, status, POINTS // len(states)) for run, status in states.items()]
    settings = dict.fromkeys(name for run in runs for name in run.settings)
    differing = tuple(name for name in settings if len({_key(run.settings.get(name)) for run in runs}) > 1)
    results = dict.fromkeys(name for run in runs for name in run.results)
    ordered = sorted(results, key=lambda name: RESULTS.index(name) if name in RESULTS else -1)
    comparison = Comparison(tuple(runs), differing, tuple(ordered), by or "")
    return comparison if by is None else _sorted(comparison, by)


def _sorted(comparison: Comparison, by: str) -> Comparison:
    values = {run.run: comparison.value(run, by) for run in comparison.runs}
    if all(value is None for value in values.values()):
        available = ", ".join((*comparison.results, *comparison.differing))
        raise UsageError(f"--by {by}: no run has it; there are {available}")
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
    sign = 1 if by not in comparison.results or lower_is_better(by) else -1

    def sort_key(run: ComparedRun) -> tuple[bool, float, str]:
        number = numbers.get(run.run)
        return number is None, sign * (number or 0.0), _key(values[run.run])

    return Comparison(
        tuple(sorted(comparison.runs, key=sort_key)), comparison.differing, comparison.results, by
    )


def _compared(run: RunDir, status: Status, points: int) -> ComparedRun:
    events = run.read_events()
    steps = Steps(run.metric_lines())
    now = time.time()
    seconds, usd = paid_for(run, events, now, ended=status.ended)
    totals = totals_of(steps)
    results: dict[str, float | None] = {
        **_metrics(totals),
        "step": totals.steps or None,
        "tokens": totals.tokens,
        "seconds": seconds,
        "usd": usd,
        # A task's metrics have the peak. The memory file of a `command:` is short enough to read.
        "peak_memory": totals.peak or peak_of_first_rank(run),
    }
    return ComparedRun(
        run=run.id,
        state=status.state,
        settings=_settings(run, recipe_now(run, events)),
        results={name: value for name, value in results.items() if value is not None},
        curves=curves_of(steps, first_start(events) or now, max(50, min(1000, points))),
    )


def _metrics(totals: Totals) -> dict[str, float | None]:
    """Return the last value of training metrics, the best of evaluation metrics, the median of speeds."""
    metrics: dict[str, float | None] = {}
    for name, last in totals.last.items():
        if name.startswith("eval_"):
            metrics[name] = (totals.low if lower_is_better(name) else totals.high)[name]
        elif name == totals.speed_of and totals.speed is not None:
            metrics[name] = totals.speed
        elif name == "mfu" and totals.mfu is not None:
            metrics[name] = totals.mfu
        elif not (name == "samples_per_second" and totals.speed_of):
            metrics[name] = last
    return metrics


def _settings(run: RunDir, recipe: Mapping[str, Any]) -> dict[str, Any]:
    about = run.read_about()
    settings = {
        **{name: value for name, value in about.job.as_json().items() if name not in _NOT_COMPARED},
        "resources": {
            **about.job.resources.as_json(),
            "nodes": about.nodes,
            "gpus_per_node": about.gpus_per_node,
            "ranks_per_node": about.ranks_per_node,
        },
        "recipe": dict(recipe),
        "profile": about.cluster.name,
        "code": about.code.as_json() if about.code is not None else None,
        "versions": about.versions,
    }
    if isinstance(command := settings.get("command"), list):
        settings["command"] = shlex.join(map(str, command))
    return {name: value for name, value in _flat(settings).items() if value is not None}


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, item in value.items():
        if isinstance(item, Mapping):
            flat |= _flat(item, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = item
    return flat


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def shown(name: str, value: Any) -> str:
    """Format a setting or a result for display."""
    from launcher.spec.quantities import format_bytes, format_duration

    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if name == "peak_memory":
        return format_bytes(value)
    if name == "seconds":
        return format_duration(value)
    if name == "usd":
        return f"{value:.2f}"
    return f"{value:,.0f}" if abs(value) >= 1e4 or value == round(value) else f"{value:.4g}"


def table(comparison: Comparison, names: tuple[str, ...], *, state: bool = True) -> list[tuple[str, ...]]:
    """Return a row for each run: its id, its state if `state`, and the named settings or results."""
    return [
        (
            run.run,
            *([run.state] if state else []),
            *(shown(name, comparison.value(run, name)) for name in names),
        )
        for run in comparison.runs
    ]


def parallel(comparison: Comparison) -> dict[str, Any] | None:
    """Return differing settings and a result as parallel axes from 0 to 1, or None for fewer than three runs.

    The last axis is the result that sorts the runs, or else the loss of evaluations or of training.
    """
    candidates = (comparison.by, "eval_loss", "loss", *comparison.results)
    last = next((name for name in candidates if name in comparison.results), None)
    if last is None or not comparison.differing or len(comparison.runs) < 3:
        return None
    names = (*comparison.differing[:MAX_AXES], last)
    columns = {name: _positions(_values(comparison, name)) for name in names}
    axes = [f"{name}{_range(comparison, name, places)}" for name, places in columns.items()]
    rows = zip(*columns.values(), strict=True)
    series = [{"label": run.run, "values": row} for run, row in zip(comparison.runs, rows, strict=True)]
    return {"axes": axes, "series": series}


def _range(comparison: Comparison, name: str, places: Sequence[float | None]) -> str:
    """Return `: lowest to highest`, or "" if all values are equal."""
    if 1.0 not in places:
        return ""
    low, high = (
        shown(name, comparison.value(comparison.runs[places.index(end)], name)) for end in (0.0, 1.0)
    )
    return f": {low} to {high}{', logarithmic' if _has_wide_range(_values(comparison, name)) else ''}"


def _values(comparison: Comparison, name: str) -> list[Any]:
    return [comparison.value(run, name) for run in comparison.runs]


def _has_wide_range(values: Sequence[Any]) -> bool:
    """Return whether the values are positive numbers that span at least two orders of magnitude."""
    known = [value for value in values if value is not None]
    numbers = [value for value in known if isinstance(value, int | float) and value > 0]
    return len(numbers) == len(known) > 0 and max(numbers) >= 100 * min(numbers)


def _positions(values: Sequence[Any]) -> list[float | None]:
    """Return the position of each value between the lowest (0) and the highest (1).

    Texts are ordered alphabetically, and numbers of a wide range are placed by their logarithms.
    """
    known = [value for value in values if value is not None]
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in known):
        measure = math.log if _has_wide_range(known) else float
        scale = {_key(value): measure(value) for value in known}
    else:
        keys = sorted({_key(value) for value in known})
        scale = {key: float(place) for place, key in enumerate(keys)}
    low, high = min(scale.values(), default=0.0), max(scale.values(), default=0.0)
    return [
        None if value is None else (scale[_key(value)] - low) / (high - low) if high > low else 0.5
        for value in values
    ]

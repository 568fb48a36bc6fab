"""The content of a page about a run, as one value that is read from the run directory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from launcher.memory.estimate import Estimate
from launcher.memory.ledger import capacity_of
from launcher.memory.measured import Parts, entry_of_run, parts_of_run
from launcher.report.history import history_lines, turns_of
from launcher.report.memory_bars import Bar, bars
from launcher.report.metric_curves import Curves, Totals, curves_of, totals_of
from launcher.report.rank_memory import RankMemory, read_rank_memory
from launcher.report.run_cost import paid_for
from launcher.report.steps import Steps
from launcher.report.timeline import Timeline, timeline_of
from launcher.report.why import memory_text, verdicts, why
from launcher.rundir.files import open_regular, read_record
from launcher.rundir.layout import RunDir
from launcher.rundir.recipe_changes import changed
from launcher.rundir.time import seconds_of, stamp
from launcher.spec.command import affects_ranks, placeholder_of
from launcher.spec.events import (
    AttemptStarted,
    Event,
    RecipeChange,
    SupervisorStarted,
)
from launcher.spec.json_object import Record
from launcher.spec.quantities import format_bytes, format_duration
from launcher.spec.recipe import Recipe
from launcher.spec.recipe_rules import changes_line
from launcher.spec.records import RunRecord

if TYPE_CHECKING:
    from launcher.schedulers.base import Status

Rows = tuple[tuple[str, str], ...]
"Pairs of (name, value) in plain text."
MAX_TEXT = 64 * 1024
"Maximum bytes of a script or a record that the page shows."


class Rung(NamedTuple):
    """A recipe of the ladder."""

    words: str
    "How it differs from the rung above."
    speed: str
    "Planned speed relative to the first rung."
    taken: str
    "When the run used this recipe; empty if it never did."


class Moment(NamedTuple):
    """A memory peak, or a category of the highest peak.

    The values are bytes of tensors on the rank with the most; None means unknown.
    """

    name: str
    planned: int | None
    measured: int | None


class Failure(NamedTuple):
    """How an attempt failed."""

    attempt: int
    failure: str
    reason: str
    memory: str
    lines: tuple[str, ...]
    "The decisive line and the lines around it, or else the last lines."
    then: str


@dataclass(frozen=True)
class Spent:
    """Time and money. None means unknown."""

    seconds: float | None = None
    "Time that its supervisors have run, without time in a queue."
    queued: float = 0.0
    "Seconds in the queue, before every start."
    lost: float = 0.0
    "Seconds without training progress."
    usd: float | None = None


@dataclass(frozen=True)
class Report:
    """A snapshot of a run."""

    run: str
    name: str
    state: str
    reason: str
    ended: bool
    written: str
    "Time stamp of the snapshot."
    steps_planned: int | None
    totals: Totals
    spent: Spent
    capacity: int | None
    "Bytes of a rank's GPU; on a CPU, its memory budget."
    planned: int | None
    "Bytes of it that the plan needs."
    curves: Curves
    memory: RankMemory
    moments: tuple[Moment, ...]
    categories: tuple[Moment, ...]
    "The highest peak by category; empty if no rank measured it."
    worst: Parts | None
    "The measured categories, with rank and step."
    bars: tuple[Bar, ...]
    "The planned peaks, by category."
    timeline: Timeline
    rungs: tuple[Rung, ...]
    why: tuple[str, ...]
    history: tuple[str, ...]
    failures: tuple[Failure, ...]
    environment: Rows
    recipe: Rows
    texts: Rows
    "Job, profile and scripts."


def report_of(run: RunDir, status: Status, now: float) -> Report:
    """Read a run. `now` is in Unix seconds. Missing or damaged records leave gaps."""
    about, plan, events = run.read_about(), read_record(run.plan), run.read_events()
    began = first_start(events) or now
    steps = Steps(run.metric_lines())
    turns = turns_of(events, run.metric_lines())
    timeline = timeline_of(run, events, steps.began, turns, now, ended=status.ended)
    capacity = capacity_of_rank(about, plan)
    estimate, worst = _estimate(plan), parts_of_run(run)
    moments = _moments(run, estimate)
    return Report(
        run=run.id,
        name=about.job.name or run.id,
        state=status.state,
        reason=status.reason,
        ended=status.ended,
        written=stamp(now),
        steps_planned=status.steps,
        totals=totals_of(steps),
        spent=_spent(run, events, timeline, now, ended=status.ended),
        capacity=capacity,
        planned=estimate.needed if estimate is not None else None,
        curves=curves_of(steps, began),
        memory=read_rank_memory(run, began),
        moments=moments,
        categories=_categories(estimate if any(one.planned for one in moments) else None, worst),
        worst=worst,
        bars=tuple(bars(estimate)) if estimate is not None else (),
        timeline=timeline,
        rungs=_rungs(plan, events),
        why=tuple(why(run, status)),
        history=tuple(history_lines(run, events, turns)),
        failures=_failures(run),
        environment=_environment(run, events),
        recipe=_recipe_rows(about, recipe_now(run, events)),
        texts=_texts(run),
    )


def first_start(events: Sequence[Event]) -> float | None:
    """Return when the first attempt started, in Unix seconds, or None if none has."""
    return next((seconds_of(event.time) for event in events if isinstance(event, AttemptStarted)), None)


def _spent(run: RunDir, events: Sequence[Event], timeline: Timeline, now: float, *, ended: bool) -> Spent:
    seconds, usd = paid_for(run, events, now, ended=ended)
    waits, losses = (
        [span.end - span.begin for span in timeline.spans if span.kind == kind] for kind in ("queue", "lost")
    )
    return Spent(seconds=seconds, queued=sum(waits), lost=sum(losses), usd=usd)


def capacity_of_rank(about: RunRecord, plan: dict[str, Any]) -> int | None:
    """Return the bytes of a rank's GPU, or of its memory budget on a CPU, or None if unknown."""
    try:
        job, cluster = about.job.validated(), about.cluster.validated()
        return capacity_of(job, cluster, on_gpu=bool(plan["layout"]["gpus_per_node"]))
    except (LookupError, TypeError, ValueError):  # another version wrote it
        return None


def _estimate(plan: dict[str, Any]) -> Estimate | None:
    try:
        return Estimate.model_validate(plan["estimate"])
    except (LookupError, ValueError):
        return None


def _moments(run: RunDir, estimate: Estimate | None) -> tuple[Moment, ...]:
    entry = entry_of_run(run)
    measured = dict(entry.measured) if entry is not None else {}
    predicted: dict[str, int] = dict(entry.predicted) if entry is not None else {}
    if not predicted and not measured and estimate is not None:
        for peak in estimate.peaks:
            predicted[peak.when] = max(predicted.get(peak.when, 0), peak.allocated)
    names = dict.fromkeys([*predicted, *measured])
    moments = [Moment(f"tensors, {name}", predicted.get(name), measured.get(name)) for name in names]
    if entry is not None and entry.reserved is not None:
        reserved = estimate.reserved if estimate is not None and entry.predicted else None
        moments.append(Moment("held by PyTorch's allocator", reserved, entry.reserved))
    return tuple(moments)


def _categories(estimate: Estimate | None, worst: Parts | None) -> tuple[Moment, ...]:
    """Return the categories of the measured peak, with the planned bytes summed into the same categories.

    `estimate` is None if the run did not use the plan's recipe.
    """
    if worst is None:
        return ()
    planned: dict[str, int] = {}
    *_, rest = worst.bytes
    for name, size in estimate.worst.parts.items() if estimate is not None else ():
        category = next((one for one in worst.bytes if name in one.split(", ")), rest)
        planned[category] = planned.get(category, 0) + size
    names = dict.fromkeys([*worst.bytes, *planned])
    return tuple(Moment(name, planned.get(name), worst.bytes.get(name)) for name in names)


def recipe_now(run: RunDir, events: Sequence[Event]) -> dict[str, Any]:
    """Return the recipe that the run used last, or the planned one."""
    last_recipe: dict[str, Any] = read_record(run.plan).get("recipe") or {}
    for recipe, _ in _recipes(events):
        last_recipe = recipe.model_dump()
    return last_recipe


def _recipe_rows(about: RunRecord, recipe: dict[str, Any]) -> Rows:
    """Return the recipe fields that are set; for a `command:`, only those that it can read."""
    shown = [
        name
        for name in recipe
        if about.job.task is not None
        or placeholder_of(f"recipe.{name}") is not None
        or affects_ranks(f"recipe.{name}")
    ]
    return tuple((name, text) for name in shown if (text := _text(recipe[name])))


def _recipes(events: Sequence[Event]) -> list[tuple[Recipe, str]]:
    """Return every recipe that the run used, with the attempt and step at which it began."""
    recipes: list[tuple[Recipe, str]] = []
    recipe: Recipe | None = None
    attempt = 0
    for event in events:
        try:
            if isinstance(event, AttemptStarted):
                recipe, attempt, when = Recipe.model_validate(event.recipe), event.attempt, ""
            elif isinstance(event, RecipeChange) and event.in_process and recipe is not None:
                recipe, when = (
                    changed(recipe, event),
                    f", step {event.step}" if event.step is not None else "",
                )
            else:
                continue
        except ValueError:  # another version's recipe
            continue
        recipes.append((recipe, f"attempt {attempt}{when}"))
    return recipes


def _rungs(plan: dict[str, Any], events: Sequence[Event]) -> tuple[Rung, ...]:
    try:
        recipes = [Recipe.model_validate(one) for one in (plan["recipe"], *plan["ladder"])]
    except (LookupError, TypeError, ValueError):
        return ()
    taken: dict[Recipe, list[str]] = {}
    for recipe, when in _recipes(events):
        taken.setdefault(recipe, []).append(when)
    not_in_ladder = [recipe for recipe in taken if recipe not in recipes]
    speeds = [1.0, *plan.get("ladder_speed", ())]
    rungs = []
    for number, recipe in enumerate([*recipes, *not_in_ladder]):
        above = recipes[min(number, len(recipes)) - 1] if number else None
        words = "the planned recipe" if above is None else changes_line(recipe, above) or "as above"
        speed = f"{speeds[number]:.0%}" if number < len(speeds) > 1 else ""
        when = ", ".join(taken.get(recipe, ())[:3])
        rungs.append(Rung(words, speed, when))
    return tuple(rungs)


def _failures(run: RunDir) -> tuple[Failure, ...]:
    failures = []
    for attempt, verdict, then in verdicts(run):
        if verdict.ok:
            continue
        cause = next((finding for finding in verdict.seen if not finding.why), None)
        if cause is not None:
            lines = (*cause.before, f"{cause.place}  {cause.text}".strip())
        else:
            lines = tuple(verdict.last_lines[-6:])
        if verdict.exception and not any(verdict.exception[:60] in line for line in lines):
            lines = (*lines, verdict.exception)
        memory = memory_text(verdict.memory)
        done = "" if then == verdict.reason else then
        failures.append(Failure(attempt, verdict.failure, verdict.reason, memory, lines, done))
    return tuple(failures)


def _environment(run: RunDir, events: Sequence[Event]) -> Rows:
    about = run.read_about()
    hosts = dict.fromkeys(
        event.host for event in events if isinstance(event, SupervisorStarted) and event.host is not None
    )
    changed = about.code.changed_files if about.code is not None else []
    code = f"{about.code.commit}{'; changed: ' * bool(changed)}{', '.join(changed)}" if about.code else ""
    rows = [
        ("profile", f"{about.cluster.name} ({about.cluster.scheduler})" if about.cluster.name else ""),
        (
            "nodes",
            f"{about.nodes} x {about.ranks_per_node or '?'} ranks, {about.gpus_per_node} GPUs each"
            if about.nodes
            else "",
        ),
        ("GPU", _text(about.cluster.node.gpu.type) if about.gpus_per_node else ""),
        ("host", ", ".join(map(str, hosts))),
        ("submitted", about.created),
        ("directory", str(run.path)),
        ("workdir", about.workdir or ""),
        ("code", code),
        *((name, _text(version)) for name, version in (about.versions or {}).items()),
        ("image", about.job.image or ""),
        ("tags", _text(about.job.tags)),
    ]
    return tuple((name, value) for name, value in rows if value)


def _texts(run: RunDir) -> Rows:
    about = run.read_about()
    texts = [("job", _record(about.job)), ("profile", _record(about.cluster))]
    if run.scripts.is_dir():
        for path in sorted(path for path in run.scripts.iterdir() if not path.name.startswith(".")):
            try:
                with open_regular(path) as file:
                    texts.append((f"scripts/{path.name}", file.read(MAX_TEXT).decode(errors="replace")))
            except OSError:
                continue
    return tuple(texts)


def _record(value: Record) -> str:
    """Format a record as JSON, without empty fields."""
    return json.dumps(_without_empty(value.as_json()), indent=2, ensure_ascii=False)[:MAX_TEXT]


def _without_empty(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    fields = {name: _without_empty(one) for name, one in value.items()}
    return {name: one for name, one in fields.items() if one not in (None, {}, [], "")}


def _text(value: object) -> str:
    if value in (None, {}, []):
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


QUEUED = 10.0
"Seconds. A shorter time in the queue is not shown, because a run without a queue also takes time to start."


def headline(report: Report) -> list[tuple[str, str]]:
    """Return the numbers at the top of the page as (name, value)."""
    totals, spent = report.totals, report.spent
    steps = f"{totals.steps:,}" + (f" of {report.steps_planned:,}" if report.steps_planned else "")
    unit = "tokens/s" if totals.speed_of == "tokens_per_second" else "samples/s"
    highest = report.memory.highest.get("peak") or report.memory.highest.get("used")
    of = f" of {format_bytes(report.capacity)}" if report.capacity else ""
    host = report.memory.highest.get("rss")
    loss, held_out = totals.last.get("loss"), totals.low.get("eval_loss")
    rows = [
        ("steps", steps if totals.steps or report.steps_planned else ""),
        ("loss", "" if loss is None else f"{loss:.4g}"),
        ("best eval loss", "" if held_out is None else f"{held_out:.4g}"),
        ("tokens", "" if totals.tokens is None else f"{totals.tokens:,.0f}"),
        ("time", "" if spent.seconds is None else format_duration(spent.seconds)),
        ("in the queue", format_duration(spent.queued) if spent.queued >= QUEUED else ""),
        ("lost", format_duration(spent.lost) if spent.lost >= 0.5 else ""),
        (
            unit,
            ""
            if totals.speed is None
            else f"{totals.speed:,.4g}"
            if totals.speed < 1e4
            else f"{totals.speed:,.0f}",
        ),
        ("MFU", "" if totals.mfu is None else f"{totals.mfu:.1%}"),
        ("peak memory", "" if highest is None else f"{format_bytes(highest.bytes)}{of}"),
        ("host memory of a rank", "" if host is None or highest is not None else format_bytes(host.bytes)),
        ("cost", "" if spent.usd is None else f"{spent.usd:,.2f} USD"),
    ]
    return [(name, value) for name, value in rows if value]

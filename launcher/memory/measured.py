"""Read a run's measured memory from its files, as an entry of the ledger."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from launcher.memory.ledger import Entry, capacity_of, family_of
from launcher.rundir.files import open_regular, read_record
from launcher.rundir.layout import AttemptDir, RunDir
from launcher.rundir.recipe_changes import changes_within, ran_out, recipe_in_force
from launcher.spec.events import Event
from launcher.spec.fire_drill import DRILLS
from launcher.spec.json_forms import fits
from launcher.spec.recipe import Recipe
from launcher.spec.records import RunRecord

HEAD = 2**20
"Bytes that are read of each rank's file: some thousand steps, enough to contain every peak."
MOMENTS = {
    "first step": "first step",
    "resume": "resume",
    "steady state": "steady state",
    "evaluation": "steady state",
    "checkpoint": "steady state",
}
"""Moment of a predicted peak -> moment at which it is measured. A rank reads its peak once per step, so the
peaks of evaluation and checkpoints are part of a step's peak."""


def entry_of_run(run: RunDir, parameters: int | None = None) -> Entry | None:
    """Return the ledger entry of the run's newest attempt that did not end by OOM.

    Returns None if the run measured nothing (a command, a CPU without a budget, a single step), or if its
    files cannot be read. The prediction is `estimate.peaks` of plan.json, if the attempt ran the plan's
    recipe. `parameters`: number of the model's parameters, if known.
    """
    try:
        record, plan, events = run.read_about(), read_record(run.plan), run.read_events()
        for attempt in reversed(run.attempts()):
            judged = attempt.read_verdict()
            if judged is not None and judged.verdict.failure in ("gpu-oom", "host-oom"):
                continue
            changes = changes_within(events, attempt.number)
            held = _held(attempt, after=max((change.step or 0 for change in changes), default=0))
            if held is not None:
                return _entry(run, record, plan, events, attempt, held, parameters)
    except (OSError, LookupError, TypeError, ValueError, AttributeError):  # written by another version
        pass
    return None


class Parts(NamedTuple):
    """The parts of one step's peak, on the rank with the highest peak."""

    rank: int
    step: int
    bytes: dict[str, int]
    "By category; the last one is the rest."


def parts_of_run(run: RunDir) -> Parts | None:
    """Return the last categories that the newest attempt with any has measured; None if there are none.

    A command and a CPU without a memory budget measure none.
    """
    for attempt in reversed(run.attempts()):
        measured = [parts for path in _files(attempt) if (parts := _parts(path)) is not None]
        if measured:
            return max(measured, key=lambda parts: (sum(parts.bytes.values()), -parts.rank))
    return None


def _parts(path: Path) -> Parts | None:
    with contextlib.suppress(OSError, ValueError), open_regular(path) as file:
        for line in reversed(file.read(HEAD).splitlines()):
            if b'"parts"' not in line:
                continue
            value = _line(line)
            if fits(value, {"step": int, "parts": {"*": int}}) and value["parts"]:
                return Parts(int(path.stem.partition("-")[2]), value["step"], value["parts"])
    return None


def _files(attempt: AttemptDir) -> list[Path]:
    return sorted((attempt.path / "memory").glob("rank-*.jsonl"))


class Held(NamedTuple):
    """Measured memory of an attempt, in bytes, for the rank with the most."""

    peaks: dict[str, int]
    reserved: int | None
    retries: int


def _held(attempt: AttemptDir, after: int) -> Held | None:
    """Read an attempt's memory. `after`: the step of the last change of the recipe, 0 if there was none."""
    peaks: dict[str, int] = {}
    reserved, retries = 0, 0
    for path in _files(attempt):
        with open_regular(path) as file:
            lines = [line for line in map(_line, file.read(HEAD).splitlines()) if "peak" in line]
        lines = [line for line in lines if line["step"] > after]
        for index, line in enumerate(lines):
            # The first reading includes what came before: building the model, or loading a checkpoint.
            start = "first step" if line["step"] == 1 else "resume"
            when = "steady state" if index or after else start
            peaks[when] = max(peaks.get(when, 0), line["peak"])
            reserved = max(reserved, line.get("reserved", 0))
            retries = max(retries, line.get("num_alloc_retries", 0))
    return Held(peaks, reserved or None, retries) if "steady state" in peaks else None


def _line(text: bytes) -> dict[str, Any]:
    """Parse one line; return {} for a torn line."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _entry(
    run: RunDir,
    record: RunRecord,
    plan: dict[str, Any],
    events: list[Event],
    attempt: AttemptDir,
    held: Held,
    parameters: int | None,
) -> Entry | None:
    job, cluster = record.job.validated(), record.cluster.validated()
    on_gpu, versions = record.gpus_per_node > 0, record.versions or {}
    family = family_of(job, cluster, versions["torch"], on_gpu=on_gpu)
    if family is None:
        return None
    begun = Recipe.model_validate(run.read_recipe(attempt))
    recipe = recipe_in_force(begun, events, attempt.number)
    as_planned = recipe.model_dump() == plan.get("recipe")
    return Entry(
        family=family,
        args=job.shaped_by,
        parameters=parameters,
        recipe=recipe,
        ranks=record.nodes * record.ranks_per_node,
        ranks_per_node=record.ranks_per_node,
        measured=held.peaks,
        predicted=_predicted(plan) if as_planned else {},
        reserved=held.reserved,
        retries=held.retries,
        ran_out=() if DRILLS in job.env else ran_out(events),  # a drill's OOM is not real
        capacity=capacity_of(job, cluster, on_gpu=on_gpu),
        versions=versions,
        run=run.id,
    )


def _predicted(plan: dict[str, Any]) -> dict[str, int]:
    peaks: dict[str, int] = {}
    for peak in (plan.get("estimate") or {}).get("peaks", ()):
        when = MOMENTS[peak["when"]]
        peaks[when] = max(peaks.get(when, 0), peak["allocated"])
    return peaks

"""Find the runs that a user wants to delete, and check that they may be deleted."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from launcher.rundir.find import SweepRuns, find, runs_in
from launcher.rundir.layout import RunDir
from launcher.schedulers.base import UNFINISHED, SchedulerError
from launcher.schedulers.local import LocalScheduler
from launcher.schedulers.lookup import scheduler_of, statuses
from launcher.spec.errors import UsageError
from launcher.spec.quantities import parse_seconds


def to_delete(names: Sequence[str], older_than: str | None = None) -> list[RunDir]:
    """Find the runs and sweeps of these names, and ended runs that last changed before `older_than` (`7d`).

    `lookup.remove` deletes them. Raises RunNotFoundError, UsageError, and SchedulerError for a run that has
    not ended.
    """
    chosen: list[RunDir] = []
    for name in names:
        match = find(name)
        chosen += match.runs if isinstance(match, SweepRuns) else [match]
    for run in chosen:
        _check_form(run)
    for status in statuses(chosen):
        if not status.ended:
            raise SchedulerError(f"{status.run_id} is still running; cancel it first")
    chosen += _older_than(older_than) if older_than is not None else []
    return [RunDir(path) for path in dict.fromkeys(run.path for run in chosen)]


def _check_form(run: RunDir) -> None:
    """Raise UsageError for a folder with a run.json that launcher did not write there."""
    name = run.read_about().id
    renamed = name != run.id and not isinstance(scheduler_of(run), LocalScheduler)
    if name is None or renamed or not run.plan.is_file():
        raise UsageError(
            f"{run.path} does not look like a run directory as launcher makes them; delete it by hand"
        )


def _older_than(text: str) -> Iterable[RunDir]:
    try:
        limit = time.time() - parse_seconds(text)
    except ValueError as error:
        raise UsageError(f"--older-than: {error}") from None
    old = [run for run in runs_in() if run.state.exists() and run.state.stat().st_mtime < limit]
    return [
        RunDir(Path(status.path)) for status in statuses(old) if status.state in UNFINISHED | {"succeeded"}
    ]

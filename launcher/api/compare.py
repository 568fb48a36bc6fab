"""Compare runs: find them by id, job, tag, sweep or pattern, and read their settings and results."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence

from launcher.report.comparison import Comparison, comparison_of
from launcher.rundir.find import RunNotFoundError, SweepRuns, find, runs_in
from launcher.rundir.layout import RunDir
from launcher.schedulers.lookup import states_of


def chosen(names: Sequence[str]) -> list[RunDir]:
    """Return the runs of these names, each once, in the order named.

    A name is that of a job, a tag, the id of a run or sweep or its beginning, a path, or a pattern such as
    `gpt-*` for ids, jobs and tags. Raises RunNotFoundError.
    """
    runs: dict[RunDir, None] = {}
    for name in names:
        runs |= dict.fromkeys(_of_name(name))
    return list(runs)


def _of_name(name: str) -> list[RunDir]:
    all_runs = list(reversed(runs_in()))
    if named := [run for run in all_runs if name in _names(run)]:
        return named
    if any(char in name for char in "*?["):
        if matching := [run for run in all_runs if fnmatch.filter((run.id, *_names(run)), name)]:
            return matching
        raise RunNotFoundError(f"no run, job or tag matches {name!r}")
    match = find(name)
    return list(match.runs) if isinstance(match, SweepRuns) else [match]


def _names(run: RunDir) -> list[str]:
    """Return the name and the tags of the run's job."""
    job = run.read_about().job
    return [str(name) for name in (job.name, *(job.tags if isinstance(job.tags, list) else ()))]


def compared(runs: Iterable[RunDir], by: str | None = None) -> Comparison:
    """Compare runs, the best first if they are sorted `by` a result or a setting.

    Raises SchedulerError if the cluster of a run does not answer, RunNotFoundError if there is no run, and
    UsageError if no run has a value for `by`.
    """
    states = states_of(runs)
    if not states:
        raise RunNotFoundError("there is no run to compare")
    return comparison_of(states, by)

"""Submit jobs, and find their runs again."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from launcher.api.given_job import JobLike, Values, as_text, overrides_of
from launcher.api.listing import Filter, listed
from launcher.api.model_sources import WHOLE_PROCESS
from launcher.api.prepare import Limits, prepared
from launcher.api.run import Run, Runs
from launcher.api.warn import warn_caller
from launcher.schedulers.base import Prepared, Scheduler
from launcher.schedulers.missing_files import check_workdir
from launcher.spec.errors import UsageError

Sweep = Mapping[str, Sequence[Any] | str]


@overload
def submit(
    job: JobLike,
    cluster: str = ...,
    *,
    set: Values | Sequence[str] | None = ...,
    max_price: float | None = ...,
    budget: float | None = ...,
    max_hours: float | None = ...,
) -> Run: ...
@overload
def submit(
    job: JobLike,
    cluster: str = ...,
    *,
    set: Values | Sequence[str] | None = ...,
    sweep: Sweep,
    at_once: int | None = ...,
    samples: int | None = ...,
    seed: int = ...,
    max_price: float | None = ...,
    budget: float | None = ...,
    max_hours: float | None = ...,
) -> Runs: ...
def submit(
    job: JobLike,
    cluster: str = "local",
    *,
    set: Values | Sequence[str] | None = None,
    sweep: Sweep | None = None,
    at_once: int | None = None,
    samples: int | None = None,
    seed: int = 0,
    max_price: float | None = None,
    budget: float | None = None,
    max_hours: float | None = None,
) -> Run | Runs:
    """Plan a job and start it detached.

    `job` is a file, a mapping with the fields of one, or a Job. `cluster` is the name or the file of a
    profile. `set` overrides fields, such as `{"train.lr": 1e-4}`; the profile's fields begin with `cluster.`.
    `sweep` holds lists of values, such as `{"train.lr": [1e-4, 3e-4]}`, and starts a run for each
    combination, `at_once` of them at the same time. A text such as `"loguniform(1e-5,1e-3)"` in place of a
    list is drawn `samples` times from `seed`. `max_price` (USD per hour), `budget` (USD) and
    `max_hours` limit what is rented, for each run of a sweep.

    Each warning of the plan and the cluster is a UserWarning. Raises SpecError for errors in a file,
    UsageError for a file that cannot be read, PlanRefusedError and SchedulerError if the job cannot run
    there, and UnclearError if the cluster did not answer and the run may have begun.
    """
    sets = overrides_of(set)
    limits = Limits(max_price, budget, max_hours)
    if (at_once is not None or samples is not None) and sweep is None:
        raise UsageError("at_once and samples need a sweep: give sweep, too")
    counts: dict[str, Any] = {"at_once": at_once, "samples": samples}
    for name, count in counts.items():
        if count is not None and (not isinstance(count, numbers.Integral) or count < 1):
            raise UsageError(f"{name}: give a whole number from 1 on, not {count!r}")
    if sweep is not None and not isinstance(sweep, Mapping):
        raise UsageError("sweep: give a mapping of field names to lists of values")
    with WHOLE_PROCESS:
        if sweep is not None:
            return _swept(job, cluster, sets, sweep, at_once, samples, seed, limits)
        scheduler, ready = prepared(job, cluster, sets, limits=limits)
        warn_caller(checked(scheduler, ready))
        return Run(scheduler.submit(ready))


def checked(scheduler: Scheduler, ready: Prepared) -> tuple[str, ...]:
    """Check for what would fail. Return warnings, the plan's first. Raises SpecError, SchedulerError."""
    check_workdir(ready.request)
    return (*ready.warnings, *scheduler.check(ready))


def _swept(
    job: JobLike,
    cluster: str,
    sets: Sequence[str],
    sweep: Sweep,
    at_once: int | None,
    samples: int | None,
    seed: int,
    limits: Limits,
) -> Runs:
    from launcher.api.sweep import checked_sweep, prepared_sweep
    from launcher.api.sweep_values import Field

    for name, values in sweep.items():
        if not isinstance(values, Iterable) or isinstance(values, Mapping | bytes):
            raise UsageError(f"sweep: {name}: give a list of values, not {values!r}")
    fields = [
        f"{name}={values}"
        if isinstance(values, str)
        else Field(name, tuple(as_text(name, value) for value in values))
        for name, values in sweep.items()
    ]
    scheduler, sweep_ = prepared_sweep(job, cluster, sets, fields, at_once, samples, seed, limits)
    warn_caller(checked_sweep(sweep_, scheduler))
    return Runs(map(Run, scheduler.submit_sweep(sweep_)))


def run(
    job: JobLike,
    cluster: str = "local",
    *,
    set: Values | Sequence[str] | None = None,
    timeout: float | None = None,
) -> Run:
    """Call `submit`, and wait until the run has ended. It may have failed: see `run.verdict`.

    Raises what `submit` raises, and TimeoutError.
    """
    started = submit(job, cluster, set=set)
    started.wait(timeout)
    return started


def runs(
    *,
    state: str | None = None,
    name: str | None = None,
    cluster: str | None = None,
    tag: str | None = None,
    since: str | None = None,
    root: str | Path | None = None,
) -> Runs:
    """Return the runs that this machine knows, newest first.

    `state` is a state of `launcher list`, such as `running`. `name` and `tag` are the job's, `cluster` is the
    profile's name. `since` is the earliest submission: `7d` ago, or a UTC time. `root` limits the search to
    one folder. Raises UsageError.
    """
    filter_ = Filter(state, name, cluster, tag, since)
    return Runs(
        Run(run_dir) for run_dir in listed(filter_, root=Path(root) if root is not None else None).statuses
    )

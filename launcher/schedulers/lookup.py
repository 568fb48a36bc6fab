"""Find the scheduler of a run, and query the states of many runs with one query per cluster."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from launcher.rundir.find import RunNotFoundError
from launcher.rundir.layout import RunDir
from launcher.schedulers.base import Cancelled, Scheduler, SchedulerError, Status
from launcher.schedulers.registry import UnknownSchedulerError, of_record, scheduler_class
from launcher.schedulers.rundir import was_sent
from launcher.schedulers.wanted_files import Wanted
from launcher.spec.records import ClusterRecord

LOCAL = ClusterRecord(scheduler="local")


def scheduler_of(run: RunDir) -> Scheduler:
    """Return the scheduler of a run. Raises UnknownSchedulerError.

    A run that was only rendered or written, and one whose supervisor is a process of this machine, are local.
    """
    cluster = run.read_about().cluster
    if not was_sent(run) or scheduler_class(cluster.scheduler or "local").is_here(run, cluster):
        return of_record(LOCAL)
    return of_record(cluster)


def fetch_to_read(run: RunDir, wanted: Wanted | None = None) -> str:
    """Update the local copy of a run. Return "", or why the copy of a run that has ended is not up to date.

    Raises SchedulerError if a run that has not ended cannot be fetched.
    """
    try:
        scheduler_of(run).fetch(run, wanted)
    except SchedulerError as error:
        if not run.read_state().ended:
            raise
        return f"{error}; the copy of {run.id} on this machine is read, which may lack lines of its ranks"
    return ""


def statuses(runs: Iterable[RunDir]) -> list[Status]:
    """Return the status of each run, in the given order.

    Runs deleted in the meantime are left out; unreadable ones are damaged.
    """
    return list(states_of(runs).values())


def states_of(runs: Iterable[RunDir]) -> dict[RunDir, Status]:
    """Return the same as `statuses`, as a mapping from each run."""
    chosen = list(runs)
    statuses_by_run: dict[RunDir, Status] = {}
    by_scheduler: dict[Scheduler, list[RunDir]] = {}
    for run in chosen:
        try:
            by_scheduler.setdefault(scheduler_of(run), []).append(run)
        except (*DAMAGE, UnknownSchedulerError) as error:
            statuses_by_run |= _damaged(run, error)
    for scheduler, its_runs in by_scheduler.items():
        statuses_by_run |= _states_at(scheduler, its_runs)
    return {run: statuses_by_run[run] for run in chosen if run in statuses_by_run}


def _states_at(scheduler: Scheduler, runs: Sequence[RunDir]) -> dict[RunDir, Status]:
    """Return the statuses of the runs of one scheduler. If any is damaged, query each by itself."""
    try:
        return dict(zip(runs, scheduler.statuses(runs), strict=True))
    except DAMAGE as error:
        if len(runs) == 1:
            return _damaged(runs[0], error)
        return {run: status for single in runs for run, status in _states_at(scheduler, [single]).items()}


DAMAGE = (RunNotFoundError, LookupError, TypeError, ValueError, AttributeError, OSError)
"Exceptions from reading a run's records if they are not as launcher writes them."


def _damaged(run: RunDir, error: Exception) -> dict[RunDir, Status]:
    """Return the status of a damaged run, or nothing if the run was deleted in the meantime."""
    if not run.submitted.exists():
        return {}
    explained = isinstance(error, RunNotFoundError | SchedulerError)
    reason = str(error) if explained else f"{type(error).__name__}: {error}"
    handle = of_record(LOCAL).handle(run)
    return {run: Status(run.id, "", "damaged", handle, reason=reason, path=str(run.path))}


def cancel_all(runs: Iterable[RunDir], name: str) -> Cancelled:
    """Cancel the runs that have not ended, with one query per cluster. Messages call them `name`.

    Raises SchedulerError, also if all of them have ended.
    """
    done = Cancelled()
    for scheduler, its_runs in _by_scheduler(runs).items():
        done += scheduler.cancel_all(its_runs, name)
    if done == Cancelled():
        raise SchedulerError(f"{name}: none of its runs is running or waiting")
    return done


def remove(runs: Iterable[RunDir]) -> dict[RunDir, SchedulerError | OSError]:
    """Delete everything of the runs, here and where they ran.

    Return those that could not be deleted, each with the reason.
    """
    failed: dict[RunDir, SchedulerError | OSError] = {}
    for scheduler, its_runs in _by_scheduler(runs).items():
        failed |= _remove_at(scheduler, its_runs)
    return failed


def _remove_at(scheduler: Scheduler, runs: Sequence[RunDir]) -> dict[RunDir, SchedulerError | OSError]:
    """Delete runs of one scheduler, or each by itself if that fails. Return those that are left, and why."""
    from launcher.schedulers.login import LoginError

    try:
        scheduler.remove(runs)
    except (SchedulerError, OSError) as error:
        remaining = [run for run in runs if run.path.exists()]
        if len(remaining) < 2 or isinstance(
            error, LoginError
        ):  # a host that does not answer is not asked again
            return dict.fromkeys(remaining, error)
        return {run: why for single in remaining for run, why in _remove_at(scheduler, [single]).items()}
    return {}


def _by_scheduler(runs: Iterable[RunDir]) -> dict[Scheduler, list[RunDir]]:
    by_scheduler: dict[Scheduler, list[RunDir]] = {}
    for run in runs:
        by_scheduler.setdefault(scheduler_of(run), []).append(run)
    return by_scheduler

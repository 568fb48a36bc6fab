"""Which scheduler has a run, and the states of many runs with one question to each cluster."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from launcher.rundir.find import RunNotFoundError
from launcher.rundir.layout import RunDir
from launcher.schedulers.base import Cancelled, Scheduler, SchedulerError, Status
from launcher.schedulers.registry import UnknownSchedulerError, of_record, scheduler_class

LOCAL = {"scheduler": "local"}


def scheduler_of(run: RunDir) -> Scheduler:
    """A run that was only rendered, and one whose supervisor is a process of this machine, are local ones.
    Raises UnknownSchedulerError."""
    cluster: dict[str, Any] = run.read_about().get("cluster") or LOCAL
    kind = scheduler_class(str(cluster.get("scheduler", "local")))
    if not _was_sent(run) or kind.is_here(run, cluster):
        return of_record(LOCAL)
    return of_record(cluster)


def statuses(runs: Iterable[RunDir]) -> list[Status]:
    """In the order given. One that was deleted meanwhile is left out, one that cannot be read is damaged."""
    return list(states_of(runs).values())


def states_of(runs: Iterable[RunDir]) -> dict[RunDir, Status]:
    """As `statuses`, each with its run."""
    chosen = list(runs)
    found: dict[RunDir, Status] = {}
    by_scheduler: dict[Scheduler, list[RunDir]] = {}
    for run in chosen:
        try:
            by_scheduler.setdefault(scheduler_of(run), []).append(run)
        except (*DAMAGE, UnknownSchedulerError) as error:
            found |= _damaged(run, error)
    for scheduler, its in by_scheduler.items():
        found |= _states_at(scheduler, its)
    return {run: found[run] for run in chosen if run in found}


def _states_at(scheduler: Scheduler, runs: Sequence[RunDir]) -> dict[RunDir, Status]:
    """Where the records of one are damaged, each is looked at by itself."""
    try:
        return dict(zip(runs, scheduler.statuses(runs), strict=True))
    except DAMAGE as error:
        if len(runs) == 1:
            return _damaged(runs[0], error)
        return {run: status for one in runs for run, status in _states_at(scheduler, [one]).items()}


DAMAGE = (RunNotFoundError, LookupError, TypeError, ValueError, AttributeError, OSError)
"What reading the records of a run raises when they are not as launcher writes them."


def _damaged(run: RunDir, error: Exception) -> dict[RunDir, Status]:
    """Nothing where the run was deleted meanwhile."""
    if not run.submitted.exists():
        return {}
    told = isinstance(error, RunNotFoundError | SchedulerError)
    reason = str(error) if told else f"{type(error).__name__}: {error}"
    handle = of_record(LOCAL).handle(run)
    return {run: Status(run.id, "", "damaged", handle, reason=reason, path=str(run.path))}


def cancel_all(runs: Iterable[RunDir], name: str) -> Cancelled:
    """Those that have not ended, with one question to each cluster. `name` says what they are together.
    Raises SchedulerError, also where all of them have ended."""
    done = Cancelled()
    for scheduler, its in _by_scheduler(runs).items():
        done += scheduler.cancel_all(its, name)
    if done == Cancelled():
        raise SchedulerError(f"{name}: none of its runs is running or waiting")
    return done


def remove(runs: Iterable[RunDir]) -> None:
    """Logs, checkpoints, everything, here and where they ran. Raises SchedulerError, OSError."""
    for scheduler, its in _by_scheduler(runs).items():
        scheduler.remove(its)


def _by_scheduler(runs: Iterable[RunDir]) -> dict[Scheduler, list[RunDir]]:
    found: dict[Scheduler, list[RunDir]] = {}
    for run in runs:
        found.setdefault(scheduler_of(run), []).append(run)
    return found


def _was_sent(run: RunDir) -> bool:
    """Not only rendered."""
    kinds = {"submitting", "submitted", "job"}
    return any(event.get("event") in kinds for event in run.read_events())

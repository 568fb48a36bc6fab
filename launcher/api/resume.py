"""Resume a run that has ended, unchanged or with changes."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from launcher.rundir.layout import RunDir
from launcher.schedulers.base import Prepared, Scheduler, SchedulerError, Status
from launcher.schedulers.lookup import scheduler_of
from launcher.schedulers.registry import of_cluster
from launcher.schedulers.rundir import withdraw_unused


@dataclass(frozen=True)
class Resumed:
    """A run that was resumed."""

    scheduler: Scheduler
    before: Status
    again: Prepared | None
    "The new submission, if the run continues with changes."


def resume(run: RunDir, sets: Sequence[str] = (), cluster: str | None = None) -> Resumed:
    """Resume a run. `sets` overrides fields of its job, and `cluster` names another profile for the rest.

    Raises SchedulerError if it is still running, cannot be resumed or has a damaged run.json; with changes
    also SpecError, PlanRefusedError and RenderError.
    """
    if run.damage:
        raise SchedulerError(run.damage)
    with _only_one(run):
        return _resume(run, sets, cluster)


@contextlib.contextmanager
def _only_one(run: RunDir) -> Iterator[None]:
    """Refuse a second resume until the first has started its supervisor: one would run the other's plan."""
    folder = os.open(run.path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(folder)
        raise SchedulerError(f"{run.id} is being resumed by another process") from None
    except OSError:  # NFS locks no folder
        pass
    try:
        yield
    finally:
        os.close(folder)


def _resume(run: RunDir, sets: Sequence[str], cluster: str | None) -> Resumed:
    scheduler = scheduler_of(run)
    again = None
    before = scheduler.status(run)
    if before.ended:
        withdraw_unused(run)
    if sets or cluster:
        from launcher.api.resubmission import prepared_again

        if not before.ended:
            raise SchedulerError(f"{run.id} is still {before.state}; cancel it first")
        again = prepared_again(run, sets, cluster)
        scheduler = of_cluster(again.request.cluster)
    if before.state == "succeeded" and not (
        again and {"steps", "epochs"} & (again.about.changed or {}).keys()
    ):
        longer = "; `--set steps=N` trains it longer" if run.read_about().job.task else ""
        raise SchedulerError(f"{run.id} has succeeded: there is nothing to resume{longer}")
    scheduler.resume(run, again)
    return Resumed(scheduler, before, again)

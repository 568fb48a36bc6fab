"""A run that has ended goes on, as it was or with changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.rundir.layout import RunDir
from launcher.schedulers.base import Prepared, Scheduler, SchedulerError, Status
from launcher.schedulers.of_run import scheduler_of
from launcher.schedulers.registry import of_cluster


@dataclass(frozen=True)
class Resumed:
    scheduler: Scheduler
    before: Status
    again: Prepared | None
    "The new submission, if the run goes on with changes."


def resume(run: RunDir, sets: Sequence[str] = (), cluster: str | None = None) -> Resumed:
    """`sets`: overrides of its job; `cluster`: another profile, for what is left of it.

    Raises SchedulerError where it still runs or cannot go on; with changes SpecError, PlanRefusedError and
    RenderError, too.
    """
    scheduler = scheduler_of(run)
    again = None
    if sets or cluster:
        from launcher.api.again import prepared_again

        again = prepared_again(run, sets, cluster)
    before = scheduler.status(run)
    if again is not None:
        if not before.ended:
            raise SchedulerError(f"{run.id} is still {before.state}; cancel it first")
        scheduler = of_cluster(again.request.cluster)
    scheduler.resume(run, again)
    return Resumed(scheduler, before, again)

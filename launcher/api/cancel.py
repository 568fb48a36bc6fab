"""Cancel one run and describe what happens to it, or cancel all runs of a sweep."""

from __future__ import annotations

from launcher.rundir.find import SweepRuns
from launcher.rundir.layout import RunDir
from launcher.schedulers.base import Cancelled
from launcher.schedulers.lookup import cancel_all, scheduler_of
from launcher.schedulers.sweeps_without_queue import stop_submission
from launcher.spec.events import Finished


def cancel(run: RunDir) -> str:
    """Ask a run to stop, or end its ranks if it was asked before. Return a sentence that describes this.

    Raises SchedulerError.
    """
    again = run.cancel.exists()
    task = run.read_about().job.task
    scheduler = scheduler_of(run)
    scheduler.cancel(run)
    last = next(reversed(run.read_events()), None)
    if isinstance(last, Finished) and last.by == "runpod":
        return f"{run.id}: {last.reason}"
    if not scheduler.has_begun(run) or (isinstance(last, Finished) and last.by == "slurm"):
        return f"{run.id}: taken out of the queue"
    if again:
        return f"{run.id}: its ranks are being ended; `launcher status {run.id}` shows when they have"
    request = "asked to write a checkpoint and stop" if task else "its script is asked to stop by SIGTERM"
    return f"{run.id}: {request}; `launcher status {run.id}` shows when it has"


def cancel_sweep(sweep: SweepRuns) -> Cancelled:
    """Cancel the runs of a sweep that have not ended, and stop a submission that is still in progress.

    Raises SchedulerError, also if all of them have ended.
    """
    if submitted_one_by_one(sweep) is not None:
        stop_submission(sweep.id, sweep.runs)
    return cancel_all(sweep.runs, sweep.id)


def submitted_one_by_one(sweep: SweepRuns) -> int | None:
    """Return the number of runs of the sweep, or None if its runs are submitted together."""
    sweeps = (run.read_about().sweep for run in sweep.runs)  # None if the record is damaged
    return next((sweep_.runs for sweep_ in sweeps if sweep_ is not None), None)

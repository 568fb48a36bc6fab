"""Cancel one run, and say what that means for it."""

from __future__ import annotations

from launcher.rundir.layout import RunDir
from launcher.schedulers.of_run import scheduler_of
from launcher.spec.events import Finished


def cancel(run: RunDir) -> str:
    """Ask a run to stop, or end its ranks if it was asked before. Return a sentence that says which.

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
    asked = "asked to write a checkpoint and stop" if task else "its script is asked to stop by SIGTERM"
    return f"{run.id}: {asked}; `launcher status {run.id}` shows when it has"

"""Sweeps on clusters without a queue: each run is submitted separately and waits for its turn."""

from __future__ import annotations

import glob
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from launcher.rundir.files import delete_folder, read_record, replace_json
from launcher.rundir.layout import RunDir
from launcher.schedulers.base import Prepared, PreparedSweep, Scheduler, SchedulerError, UnclearError
from launcher.spec.events import AttemptStarted, since_submission
from launcher.supervise.sweep_turn import sweep_folder


class OneByOne(Scheduler):
    """A scheduler that submits the runs of a sweep one after the other."""

    def prepare_sweep(
        self, sweep_id: str, runs: Sequence[tuple[Prepared, tuple[str, ...]]], at_once: int | None = None
    ) -> PreparedSweep:
        """Record in each run its place in the sweep."""
        folder = Path(runs[0][0].run_dir).parent / "sweeps" / sweep_id
        ready = [
            prepared.in_sweep(sweep_id, task, values, runs=len(runs), at_once=at_once)
            for task, (prepared, values) in enumerate(runs)
        ]
        return PreparedSweep(sweep_id, folder, tuple(ready))

    def check_sweep(self, sweep: PreparedSweep) -> tuple[str, ...]:
        return self.check(sweep.runs[0])

    def submit_sweep(self, sweep: PreparedSweep) -> list[RunDir]:
        """Submit every run. Raises SchedulerError; earlier runs continue, unless the sweep was cancelled."""
        return submit_in_order(self, sweep, self.submit)

    def has_begun(self, run: RunDir) -> bool:
        """Return whether an attempt has started since the run was submitted or resumed."""
        return any(isinstance(event, AttemptStarted) for event in since_submission(run.read_events()))


CANCELLED = "cancelled"
"File in the sweep's folder: `launcher sweep cancel` was called, and found these runs."


def stop_submission(sweep: str, runs: Sequence[RunDir]) -> None:
    """Make a submission of the sweep that is still in progress stop before its next run.

    Call it before you cancel `runs`, which are all that you found. The submission cancels the others.
    """
    for folder in dict.fromkeys(sweep_folder(run, sweep) for run in runs):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            replace_json(folder / CANCELLED, {"runs": [run.id for run in runs]})
        except OSError as error:
            print(
                f"launcher: {folder / CANCELLED}: {error.strerror}; a `submit` that is still in progress "
                "does not see that the sweep is cancelled",
                file=sys.stderr,
            )


def submit_in_order(
    scheduler: Scheduler, sweep: PreparedSweep, submit: Callable[[Prepared], RunDir]
) -> list[RunDir]:
    """Submit the runs in their order.

    Raises SchedulerError or UnclearError with the number of runs that continue. If the sweep was cancelled
    meanwhile, none continues.
    """
    started: list[RunDir] = []
    for prepared in sweep.runs:
        _end_if_cancelled(scheduler, sweep, started)
        try:
            started.append(submit(prepared))
        except SchedulerError as error:
            if not started:
                raise
            kind = UnclearError if isinstance(error, UnclearError) else SchedulerError
            raise kind(
                f"{error}; {len(started)} of {len(sweep.runs)} runs were started and go on: "
                f"`launcher cancel {sweep.id}` ends them"
            ) from None
    _end_if_cancelled(scheduler, sweep, started)
    return started


def _end_if_cancelled(scheduler: Scheduler, sweep: PreparedSweep, started: Sequence[RunDir]) -> None:
    """If the sweep was cancelled meanwhile, cancel the remaining runs and raise SchedulerError.

    The remaining runs are those written after the cancellation, and the last one, which may have been found
    before it could be cancelled.
    """
    folders = dict.fromkeys(sweep_folder(run, sweep.id) for run in started)
    cancellation = next((record for folder in folders if (record := read_record(folder / CANCELLED))), None)
    if cancellation is None:
        return
    message = (
        f"{sweep.id} was cancelled while it was submitted: {len(started)} of {len(sweep.runs)} runs were "
        "submitted, and are cancelled"
    )
    remaining = [run for run in started if run.id not in cancellation.get("runs", ()) or run is started[-1]]
    try:
        scheduler.cancel_all(remaining, sweep.id)
    except SchedulerError as error:
        raise SchedulerError(f"{message}, except: {error}") from None
    raise SchedulerError(message)


def runs_of(folder: Path) -> list[RunDir]:
    """Return the runs of the sweep of this folder that still exist, in their order."""
    runs = [RunDir(path) for path in folder.parent.parent.glob(f"{folder.name}-*") if path.is_dir()]
    return sorted((run for run in runs if run.read_about().sweep is not None), key=task_of)


def task_of(run: RunDir) -> int:
    """Return the run's number in its sweep."""
    sweep = run.read_about().sweep
    return sweep.task if sweep is not None else 0


def remove_here(run: RunDir) -> None:
    """Delete the local run directory, and with a sweep's last run the sweep's folder. Raises OSError."""
    sweep = run.read_about().sweep
    delete_folder(run.path)
    if sweep is not None and not any(run.path.parent.glob(f"{glob.escape(sweep.id)}-*")):
        shutil.rmtree(sweep_folder(run, sweep.id), ignore_errors=True)

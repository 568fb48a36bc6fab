"""Sweeps where there is no queue: each run is submitted by itself, and waits for its turn by itself."""

from __future__ import annotations

import glob
import shutil
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.rundir.layout import RunDir
from launcher.schedulers.base import PreparedSweep, Scheduler, SchedulerError
from launcher.spec.events import AttemptStarted, Submitted
from launcher.supervise.turn import sweep_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from launcher.schedulers.base import Prepared


class OneByOne(Scheduler):
    """A scheduler that submits the runs of a sweep one after the other."""

    def prepare_sweep(
        self, sweep_id: str, runs: Sequence[tuple[Prepared, tuple[str, ...]]], at_once: int | None = None
    ) -> PreparedSweep:
        """Note in each run its place in the sweep."""
        folder = Path(runs[0][0].run_dir).parent / "sweeps" / sweep_id
        ready = [
            replace(
                prepared,
                about={
                    **prepared.about,
                    "sweep": {
                        "id": sweep_id,
                        "task": task,
                        "runs": len(runs),
                        "values": list(values),
                        "at_once": at_once,
                    },
                },
            )
            for task, (prepared, values) in enumerate(runs)
        ]
        return PreparedSweep(sweep_id, folder, tuple(ready))

    def check_sweep(self, sweep: PreparedSweep) -> tuple[str, ...]:
        return self.check(sweep.runs[0])

    def submit_sweep(self, sweep: PreparedSweep) -> list[RunDir]:
        """Submit every run. Raises SchedulerError; the runs submitted before go on."""
        return submitted(sweep, self.submit)

    def has_begun(self, run: RunDir) -> bool:
        """Return whether an attempt has started since the run was submitted or resumed."""
        events = takewhile(lambda event: not isinstance(event, Submitted), reversed(run.read_events()))
        return any(isinstance(event, AttemptStarted) for event in events)


def submitted(sweep: PreparedSweep, submit: Callable[[Prepared], RunDir]) -> list[RunDir]:
    """Submit the runs in their order. Raises SchedulerError, which says how many go on."""
    started: list[RunDir] = []
    for prepared in sweep.runs:
        try:
            started.append(submit(prepared))
        except SchedulerError as error:
            if not started:
                raise
            raise SchedulerError(
                f"{error}; {len(started)} of {len(sweep.runs)} runs were started and go on: "
                f"`launcher cancel {sweep.id}` ends them"
            ) from None
    return started


def runs_of(folder: Path) -> list[RunDir]:
    """The runs of the sweep of this folder that still exist, in their order."""
    found = [RunDir(path) for path in folder.parent.parent.glob(f"{folder.name}-*") if path.is_dir()]
    return sorted((run for run in found if run.read_about().sweep is not None), key=task_of)


def task_of(run: RunDir) -> int:
    """The run's number in its sweep."""
    sweep = run.read_about().sweep
    return sweep.task if sweep is not None else 0


def remove_here(run: RunDir) -> None:
    """Delete the run directory on this machine, and its sweep's folder with the last run. Raises OSError."""
    sweep = run.read_about().sweep
    shutil.rmtree(run.path)
    if sweep is not None and not any(run.path.parent.glob(f"{glob.escape(sweep.id)}-*")):
        shutil.rmtree(sweep_folder(run, sweep.id), ignore_errors=True)

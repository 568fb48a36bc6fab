"""Sweeps on RunPod: each run gets its own pod, which a process on this machine rents when a place is free.

This process only polls the runs: polling also rents the pod of the first run in line. It must run outside
RunPod, because RunPod has no queue, and a pod's own key cannot rent another pod.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from launcher.rundir.files import replace_json
from launcher.rundir.layout import RunDir
from launcher.rundir.time import now
from launcher.schedulers.base import Scheduler, SchedulerError
from launcher.schedulers.runpod.evidence import queues_in
from launcher.schedulers.runpod.settings import pace
from launcher.schedulers.sweep_process import has_sweep_process
from launcher.schedulers.sweeps_without_queue import runs_of, task_of
from launcher.spec.events import Waiting
from launcher.supervise.sweep_turn import sweep_folder

LOOK_SECONDS = 30.0
"Pause between two polls of all runs of a sweep."


def put_in_line(run: RunDir) -> None:
    """Record that a run of a sweep waits for its turn."""
    sweep = run.read_about().sweep
    at_once = f" (--at-once {sweep.at_once})" if sweep is not None and sweep.at_once is not None else ""
    reason = f"waits for its turn in the sweep{at_once}"
    run.append(Waiting(reason=reason, queued=True))
    replace_json(run.state, {"state": "submitted", "reason": reason, "time": now()})


def has_turn(run: RunDir) -> bool:
    """Return whether a waiting run may have a pod: no earlier run waits, and a place is free."""
    sweep = run.read_about().sweep
    if sweep is None:
        return True
    places = 0
    for other in runs_of(sweep_folder(run, sweep.id)):
        if other.read_state().ended or other.path == run.path:
            continue
        if not queues_in(other.read_events()):
            places += 1
        elif task_of(other) < sweep.task:
            return False
    return sweep.at_once is None or places < sweep.at_once


def is_attended(run: RunDir) -> bool:
    """Return whether the process that rents the pods of the run's sweep is alive."""
    sweep = run.read_about().sweep
    return sweep is None or has_sweep_process(sweep_folder(run, sweep.id))


def main(folder: str) -> None:
    """Poll the runs of the sweep in this folder until all have ended."""
    from launcher.schedulers.lookup import scheduler_of

    while runs := runs_of(Path(folder)):
        living = [_look(run, scheduler_of(run)) for run in runs if not run.read_state().ended]
        if not any(living):
            return
        time.sleep(LOOK_SECONDS * pace())


def _look(run: RunDir, scheduler: Scheduler) -> bool:
    """Return whether the run has not ended. After an error, the next poll tries again."""
    try:
        return not scheduler.status(run).ended
    except (SchedulerError, OSError) as error:
        print(f"{now()} {run.id}: {error}", file=sys.stderr, flush=True)
        return True


if __name__ == "__main__":
    main(sys.argv[1])

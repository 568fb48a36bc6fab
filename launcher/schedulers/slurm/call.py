"""On a node, in each rank: the call of a function that `launcher.slurm.Executor` has submitted.

submitit's own entry (`submitit.core._submit`) does the work: it loads the function, runs it, pickles what it
returns or raises, and calls `checkpoint` of a function that has it. What Slurm and submitit would do about
requeueing, launcher does here.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from launcher.rundir.layout import RunDir
from launcher.spec.verdict import EXIT_STOPPED


def main() -> None:
    folder, environ = sys.argv[1], os.environ
    # Slurm started one task on each node, and launcher its ranks. A rank is a task of submitit's.
    environ |= {
        "SUBMITIT_EXECUTOR": "slurm",
        "SUBMITIT_PREEMPT_SIGNAL": "TERM",  # what launcher sends when a checkpoint is wanted
        "SLURM_PROCID": environ["RANK"],
        "SLURM_LOCALID": environ["LOCAL_RANK"],
        "SLURM_NTASKS": environ["WORLD_SIZE"],
    }
    from submitit.core import job_environment, submission
    from submitit.core.utils import JobPaths
    from submitit.slurm.slurm import SlurmJobEnvironment

    paths = JobPaths(folder, job_id=environ["LAUNCHER_RUN_ID"], task_id=int(environ["RANK"]))
    paths.result_pickle.unlink(missing_ok=True)  # of an attempt before this one
    here: Any = SlurmJobEnvironment
    here.paths = property(lambda _: paths)  # by the run's id: a run goes through several jobs
    here._requeue = lambda *_: None  # the batch script does
    handler: Any = job_environment.SignalHandler
    handler._exit = lambda _: sys.exit(EXIT_STOPPED)
    handler.has_timed_out = lambda _: _why_stopped(RunDir(Path(environ["LAUNCHER_RUN_DIR"]))) == "time-limit"
    submission.process_job(folder)


def _why_stopped(run: RunDir) -> str | None:
    """The supervisor notes it before it asks the ranks."""
    reasons = [event.get("reason") for event in run.read_events() if event.get("event") == "stopping"]
    return reasons[-1] if reasons else None


if __name__ == "__main__":
    main()

"""Entry point of each rank of a function submitted through `launcher.slurm.Executor`.

submitit's own entry point (`submitit.core._submit`) does the work: it loads the function, runs it, pickles
the result or the exception, and calls the function's `checkpoint` if it has one. launcher handles requeueing
in place of Slurm and submitit.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from launcher.rundir.layout import RunDir
from launcher.spec import variables
from launcher.spec.events import Stopping, latest
from launcher.spec.verdict import EXIT_STOPPED


def main() -> None:
    folder, environ = sys.argv[1], os.environ
    # Slurm started one task per node and launcher started the ranks. Tell submitit that each rank is a task.
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

    paths = JobPaths(folder, job_id=environ[variables.RUN_ID], task_id=int(environ["RANK"]))
    paths.result_pickle.unlink(missing_ok=True)  # left by an earlier attempt
    slurm_environment: Any = SlurmJobEnvironment
    slurm_environment.paths = property(
        lambda _: paths
    )  # named by the run id, because a run can span several jobs
    slurm_environment._requeue = lambda *_: None  # the batch script requeues
    handler: Any = job_environment.SignalHandler
    handler._exit = lambda _: sys.exit(EXIT_STOPPED)
    handler.has_timed_out = lambda _: _why_stopped(RunDir(Path(environ[variables.RUN_DIR]))) == "time-limit"
    submission.process_job(folder)


def _why_stopped(run: RunDir) -> str | None:
    """Return the reason that the supervisor recorded before it asked the ranks to stop."""
    stopping = latest(run.read_events(), Stopping)
    return None if stopping is None else stopping.reason


if __name__ == "__main__":
    main()

"""The handle of a run, which names its latest Slurm job."""

from __future__ import annotations

from launcher.rundir.layout import RunDir
from launcher.schedulers.rundir import latest_handle

PREFIX = "slurm:"
UNKNOWN = "run/"


def handle_of(run: RunDir, job: str | None) -> str:
    """Return `slurm:<cluster>:<job>`, or `slurm:<cluster>:run/<run id>` as long as the job is not known."""
    cluster = run.read_about().cluster.name or ""
    return f"{PREFIX}{cluster}:{job or f'{UNKNOWN}{run.id}'}"


def job_of(run: RunDir) -> str | None:
    """Return the run's latest job, or None if there is none or sbatch's last answer was lost."""
    handle = latest_handle(run.read_events(), PREFIX)
    return None if handle is None else handle.rpartition(":")[2]


def job_in(handle: str) -> str:
    """Return the job id in a handle, or "" if it is not known."""
    job = handle.rpartition(":")[2]
    return "" if job.startswith(UNKNOWN) else job

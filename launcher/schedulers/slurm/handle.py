"""Find the Slurm job that a run is in."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.rundir.layout import RunDir
from launcher.schedulers.rundir import latest_handle

PREFIX = "slurm:"
UNKNOWN = "run/"


@dataclass(frozen=True)
class Handle:
    """`slurm:<cluster>:<job>`, or `slurm:<cluster>:run/<run id>` as long as sbatch has not answered."""

    cluster: str
    job: str | None
    run: str = ""
    "Run id, used if the job is not known."

    def __str__(self) -> str:
        return f"{PREFIX}{self.cluster}:{self.job or f'{UNKNOWN}{self.run}'}"


def handle_of(run: RunDir) -> Handle:
    """Return the handle of the run's latest job, with job None if sbatch's last answer was lost."""
    cluster = run.read_about().get("cluster", {}).get("name", "")
    handle = latest_handle(run.read_events(), PREFIX)
    return Handle(cluster, None if handle is None else handle.rpartition(":")[2], run.id)


def job_in(handle: str) -> str:
    """Return the job id in a handle, or "" if it is not known."""
    job = handle.rpartition(":")[2]
    return "" if job.startswith(UNKNOWN) else job

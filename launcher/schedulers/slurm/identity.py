"""Check that a job id belongs to the run. Slurm reuses ids, and every cluster has its own."""

from __future__ import annotations

from datetime import timedelta

from launcher.rundir.layout import RunDir
from launcher.rundir.time import seconds_of
from launcher.schedulers.slurm.jobs import folder_of_script
from launcher.schedulers.slurm.records import JobRecord
from launcher.spec.events import Submitting

CLOCKS_DIFFER = timedelta(minutes=10)


def belongs_to(record: JobRecord, run: RunDir) -> bool:
    """Return whether the job belongs to the run.

    Compare the script's folder, and the comment, which a site may change. If only accounting knows the job,
    compare its name and submission time.
    """
    about = run.read_about()
    ours = {run.id, about.sweep.id if about.sweep is not None else run.id}
    folder = folder_of_script(record.command or "")
    if record.comment in ours or folder in ours:
        return True
    if record.command or (about.cluster.slurm.comment and (record.comment or record.command is not None)):
        return False
    if record.name and record.name != about.job.name:
        return False
    sent = (seconds_of(event.time) for event in run.read_events() if isinstance(event, Submitting))
    first = next((moment for moment in sent if moment is not None), None)
    if first is None or record.submitted is None:
        return True
    return record.submitted.timestamp() > first - CLOCKS_DIFFER.total_seconds()


def message_of_foreign_job(job: str, record: JobRecord) -> str:
    what = record.comment or record.command or record.name
    return (
        f"Slurm's job {job} here does not belong to the run{f' ({what})' if what else ''}: look from a host "
        "of the cluster that the run was submitted to"
    )

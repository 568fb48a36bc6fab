"""A number of Slurm's is the run's only where the job says so."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from launcher.rundir.files import append_json, replace_json
from launcher.rundir.layout import RunDir
from launcher.schedulers.slurm.identity import belongs_to
from launcher.schedulers.slurm.records import JobRecord, Records
from launcher.schedulers.slurm.run_state import status_from_slurm

SENT = "2026-11-21T12:00:00.000000Z"


def moment(hour: int) -> datetime:
    return datetime(2026, 11, 21, hour, 1, tzinfo=timezone.utc)


def a_run(folder: Path, comment: bool = True, **more: Any) -> RunDir:
    run = RunDir(folder / "gpt-1")
    run.path.mkdir()
    cluster = {"name": "c", "scheduler": "slurm", "slurm": {"comment": comment}}
    replace_json(run.run, {"id": run.id, "job": {"name": "gpt"}, "cluster": cluster, **more})
    append_json(run.events, {"time": SENT, "event": "submitting"})
    return run


@pytest.mark.parametrize(
    ("fields", "ours"),
    [
        ({"comment": "gpt-1"}, True),
        ({"comment": "gpt-1", "command": "/tmp/slurm_copy 1"}, True),
        ({"command": "/r/gpt-1/scripts/job.sbatch 1"}, True),
        ({"command": "/r/gpt-1/plans/003/scripts/job.sbatch 2", "comment": "the site's own"}, True),
        ({"command": "/r/gpt-1/submitit/0_submission.sh"}, True),
        ({"command": "/home/me/thesis.sh"}, False),
        ({"command": "/r/gpt-2/scripts/job.sbatch 1", "comment": "gpt-2"}, False),
        ({"comment": "gpt-2"}, False),
        ({"command": ""}, False),
        ({}, True),
        ({"name": "gpt", "submitted": moment(12)}, True),
        ({"name": "gpt", "submitted": moment(18)}, True),  # requeued
        ({"name": "gpt", "submitted": moment(9)}, False),
        ({"name": "thesis", "submitted": moment(12)}, False),
    ],
)
def test_by_script_comment_name_and_time(tmp_path: Path, fields: dict[str, Any], ours: bool) -> None:
    assert belongs_to(JobRecord("7", "RUNNING", **fields), a_run(tmp_path)) == ours


def test_a_site_that_writes_the_comment_itself(tmp_path: Path) -> None:
    run = a_run(tmp_path, comment=False)
    assert belongs_to(JobRecord("7", "COMPLETED", comment="the site's own", name="gpt"), run)
    assert not belongs_to(JobRecord("7", "COMPLETED", comment="the site's own", command="/home/me/x.sh"), run)
    assert belongs_to(JobRecord("7", "COMPLETED", command=""), run)


def test_a_task_of_a_sweep(tmp_path: Path) -> None:
    run = a_run(tmp_path, sweep={"id": "gpt-sweep-1", "task": 0})
    assert belongs_to(JobRecord("7_0", "RUNNING", command="/r/.sweeps/gpt-sweep-1/array.sbatch"), run)
    assert belongs_to(JobRecord("7_0", "RUNNING", comment="gpt-sweep-1"), run)
    assert not belongs_to(JobRecord("7_0", "RUNNING", comment="gpt-sweep-2"), run)


@pytest.mark.parametrize("state", ["COMPLETED", "CANCELLED", "FAILED", "RUNNING"])
def test_the_end_of_another_job_is_not_the_runs(tmp_path: Path, state: str) -> None:
    run = a_run(tmp_path)
    replace_json(run.state, {"state": "submitted", "time": SENT})
    known = Records({"7": JobRecord("7", state, comment="thesis", exit_code=0)})
    status = status_from_slurm(run, "7", known, "")
    assert (status.state, run.read_state().state) == ("submitted", "submitted")
    assert (
        "Slurm's job 7 here does not belong to the run (thesis): look from a host of the cluster"
        in status.reason
    )


@pytest.mark.parametrize("resumed", [False, True])
def test_a_job_that_ended_well_before_an_attempt_began_is_no_success(tmp_path: Path, resumed: bool) -> None:
    run = a_run(tmp_path)
    if resumed:
        run.attempt(0).path.mkdir(parents=True)
        started = {"attempt": 0, "recipe": {"micro_batch_size": 1, "grad_accum": 1}}
        for kind, fields in (("job", {}), ("attempt", started), ("submitting", {}), ("job", {})):
            append_json(run.events, {"time": SENT, "event": kind, **fields})
    replace_json(run.state, {"state": "submitted", "time": SENT})
    known = Records({"7": JobRecord("7", "COMPLETED", comment="gpt-1", exit_code=0)})
    status = status_from_slurm(run, "7", known, "")
    assert (status.state, status.failure) == ("failed", "image-error")
    assert status.reason.startswith("job 7 ended with exit code 0 before its supervisor began")

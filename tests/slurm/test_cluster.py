"""The test cluster is what the other tests take it for."""

from __future__ import annotations

import json

import pytest

from launcher.rundir.files import append_json
from launcher.rundir.time import now
from tests.lab import wait_for
from tests.slurm.lab import SlurmLab


def test_nodes_have_names_and_addresses_of_their_own_and_reach_each_other(slurm_lab: SlurmLab) -> None:
    script = 'echo "$(hostname) $(getent hosts n2 | cut -d" " -f1)"; exec 3<>"/dev/tcp/n3/$1"'
    shape = slurm_lab.cluster.shape
    port = str(shape.port + 10 + 2)  # of the slurmd on n3
    said = slurm_lab.slurm("srun", "-N", "4", "bash", "-c", script, "bash", port).splitlines()
    second = f"10.{shape.octet}.0.2"
    assert sorted(said) == [f"n1 {second}", "n2 127.0.1.1", f"n3 {second}", f"n4 {second}"]


def test_gpus_can_be_asked_for(slurm_lab: SlurmLab) -> None:
    command = ["srun", "-N", "1", "--gpus-per-node=2", "bash", "-c", "echo $CUDA_VISIBLE_DEVICES"]
    assert slurm_lab.slurm(*command) == "0,1"


def test_accounting_knows_how_a_job_ended(slurm_lab: SlurmLab) -> None:
    job = slurm_lab.sbatch("exit 3")
    assert slurm_lab.accounted(job, "ExitCode") == [["FAILED", "3:0"]]


@pytest.mark.slow
def test_no_verb_takes_a_job_of_the_same_number_for_the_runs(slurm_lab: SlurmLab) -> None:
    """As on a login node of another cluster that shares the home, whose job has the number of ours."""
    slurm_lab.script("import time\ntime.sleep(600)\n")
    one = {"nodes": 1, "ranks_per_node": 1}
    run = slurm_lab.submit(str(slurm_lab.job(command="python train.py", resources=one)))
    wait_for(lambda: run.read_state().state == "running", "supervisor")
    theirs = slurm_lab.sbatch("sleep 600", "--hold")
    ended = slurm_lab.sbatch("true")
    slurm_lab.accounted(ended)
    own = [event.handle for event in run.read_events() if event.handle][-1]
    for job, state in ((theirs, "PENDING"), (ended, "COMPLETED")):
        append_json(run.events, {"time": now(), "event": "requeued", "handle": f"slurm:lab:{job}"})
        status = slurm_lab.status(run)
        assert (
            status["state"] == "running"
            and f"Slurm's job {job} here does not belong to the run" in status["reason"]
        )
        assert slurm_lab.slurm("squeue", "-h", "-t", "all", "-j", theirs, "-o", "%T") == "PENDING", state
    done = slurm_lab.cli("cancel", run.id)
    assert done.returncode == 0 and "here does not belong to the run" in done.stderr, (
        "its supervisor heeds the file"
    )
    assert slurm_lab.slurm("squeue", "-h", "-t", "all", "-j", theirs, "-o", "%T") == "PENDING"
    append_json(run.events, {"time": now(), "event": "requeued", "handle": own})
    assert slurm_lab.wait(run)["state"] == "cancelled"
    slurm_lab.slurm("scancel", theirs)
    waits = slurm_lab.submit(str(slurm_lab.job(command="python train.py", resources={**one, "nodes": 4})))
    theirs = slurm_lab.sbatch("sleep 600", "--hold")
    append_json(waits.events, {"time": now(), "event": "submitted", "handle": f"slurm:lab:{theirs}"})
    wait_for(lambda: json.loads(slurm_lab.cli("status", waits.id, "--json").stdout), "status")
    done = slurm_lab.cli("cancel", waits.id)
    assert slurm_lab.slurm("squeue", "-h", "-t", "all", "-j", theirs, "-o", "%T") == "PENDING", done.stdout
    slurm_lab.slurm("scancel", theirs)
    slurm_lab.slurm("scancel", "--name=e2e")


def test_what_srun_refuses_is_the_reason(slurm_lab: SlurmLab) -> None:
    slurm_lab.script("print('never')\n")
    slurm_lab.profile(srun_options=["--nosuch"])
    one = {"nodes": 1, "ranks_per_node": 1}
    run = slurm_lab.submit(str(slurm_lab.job(command="python train.py", resources=one)))
    status = slurm_lab.wait(run)
    assert status["state"] == "failed" and "srun: unrecognized option '--nosuch'" in status["reason"]

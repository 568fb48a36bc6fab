"""Slurm ends the job before a supervisor is there: nobody is blamed, and no second job appears."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from ruamel.yaml import YAML

from launcher.rundir.layout import RunDir
from launcher.spec.verdict import EXIT_CODES
from tests.lab import events, wait_for
from tests.slurm.lab import GPT, SlurmLab, handles, job_id
from tests.slurm.test_runs import ONE_RANK, Told, tells

pytestmark = pytest.mark.e2e

# As from a cold file system, which takes long to import what the check of a node asks for.
COLD = f"""#!/bin/bash
if [[ $1 == -c && $2 == *launcher* ]]; then sleep 600; fi
exec {sys.executable} "$@"
"""


def started(
    lab: SlurmLab, moment: Callable[[RunDir], Any], partition: str = "main", nodes: int = 1, **profile: Any
) -> RunDir:
    """A run whose job has come to a moment before its supervisors."""
    lab.profile(partition=partition)
    file = lab.folder / "lab.yaml"
    YAML().dump({**YAML().load(file), **profile}, file)
    resources = {**ONE_RANK, "nodes": nodes, "time": "10m"}
    run = lab.submit(str(lab.job(**{**GPT, "resources": resources})))
    wait_for(lambda: moment(run), "moment before the supervisors")
    return run


def cold(lab: SlurmLab) -> dict[str, Any]:
    python = lab.folder / "cold-python"
    python.write_text(COLD)
    python.chmod(0o755)
    return {"paths": {"python": str(python), "runs": str(lab.folder / "runs")}}


def in_the_check(run: RunDir) -> bool:
    return any(run.path.glob("slurm-*-0.nodes"))


def cancelled_in_setup(lab: SlurmLab) -> Told:
    run = started(lab, lambda run: events(run, "job"), setup=["sleep 600"])
    lab.slurm("scancel", job_id(run))
    return Told(lab, run, lab.wait(run))


def cancelled_in_the_check_of_a_node(lab: SlurmLab) -> Told:
    run = started(lab, in_the_check, **cold(lab))
    lab.slurm("scancel", job_id(run))
    return Told(lab, run, lab.wait(run))


def cancelled_in_the_check_of_two(lab: SlurmLab) -> Told:
    run = started(lab, in_the_check, nodes=2, **cold(lab))
    lab.cli("cancel", run.id)
    lab.cli("cancel", run.id)
    return Told(lab, run, lab.wait(run))


@pytest.mark.slow
@tells(cancelled_in_setup, cancelled_in_the_check_of_a_node, cancelled_in_the_check_of_two)
def test_a_job_that_is_cancelled_before_its_supervisors_start_is_cancelled(it: Told) -> None:
    assert (it.status["state"], it.status["failure"]) == ("cancelled", "cancelled"), it.lab.all_logs(it.run)
    assert it.lab.cli("status", it.run.id).returncode == EXIT_CODES["cancelled"]
    assert it.lab.accounted(job_id(it.run))[-1][0].startswith("CANCELLED")
    assert not events(it.run, "requeued") and len(handles(it.run)) == 1
    assert not (it.run.path / "slurm-excluded").exists()


def preempted_in_the_check(lab: SlurmLab) -> Told:
    run = started(lab, in_the_check, "scavenge-at-once", **cold(lab))
    (lab.folder / "cold-python").write_text(COLD.replace("sleep 600", "true"))
    lab.sbatch("sleep 3", "-p", "urgent", "-w", "n12", "--exclusive", "-t", "1")
    return Told(lab, run, lab.wait(run, "succeeded", "failed"))


@pytest.mark.slow
@tells(preempted_in_the_check)
def test_a_job_that_is_preempted_without_grace_in_the_check_is_one_job_in_the_queue_again(it: Told) -> None:
    assert it.status["state"] == "succeeded", it.lab.all_logs(it.run)
    assert [event["reason"] for event in events(it.run, "requeued")] == ["preempted"]
    assert len(handles(it.run)) == 1 and not (it.run.path / "slurm-excluded").exists()


def nowhere_to_be_found(lab: SlurmLab) -> Told:
    """An interpreter that no node has launcher in."""
    lab.profile()
    file = lab.folder / "lab.yaml"
    paths = {"python": "/usr/bin/python3", "runs": str(lab.folder / "runs")}
    YAML().dump({**YAML().load(file), "paths": paths}, file)
    run = lab.submit(str(lab.job(**GPT)))
    return Told(lab, run, lab.wait(run))


@pytest.mark.slow
@tells(nowhere_to_be_found)
def test_what_every_node_lacks_is_missing_in_the_profile(it: Told) -> None:
    assert (it.status["state"], it.status["failure"]) == ("failed", "user-error"), it.lab.all_logs(it.run)
    assert "does not import launcher" in it.status["reason"] and "cluster profile" in it.status["reason"]
    assert len(handles(it.run)) == 1 and not events(it.run, "requeued")


def crash_in_the_check(lab: SlurmLab) -> Told:
    run = started(lab, in_the_check, "fragile", nodes=2, **cold(lab))
    (lab.folder / "cold-python").write_text(COLD.replace("sleep 600", "true"))
    first = lab.slurm("squeue", "-h", "-j", job_id(run), "-o", "%N")
    victim = lab.slurm("scontrol", "show", "hostnames", first).split()[-1]
    lab.cluster.crash_node(victim)
    wait_for(lambda: "down" in lab.slurm("sinfo", "-h", "-n", victim, "-o", "%T"), "node that is down")
    status = lab.wait(run, "succeeded", "failed")
    lab.cluster.start_node(victim)  # others need two of the partition's nodes, too
    return Told(lab, run, status, {"victim": victim})


@pytest.mark.slow
@tells(crash_in_the_check)
def test_a_node_that_dies_in_the_check_costs_a_requeue_without_it(it: Told) -> None:
    assert it.status["state"] == "succeeded", it.lab.all_logs(it.run)
    # Either the check sees first that the node does not answer, or Slurm gives it up first.
    reasons = {event["reason"] for event in events(it.run, "requeued")}
    assert reasons and reasons <= {"node-failed", "unhealthy-node"}
    last = it.lab.accounted(job_id(it.run), "NodeList")[-1]
    assert it.more["victim"] not in it.lab.slurm("scontrol", "show", "hostnames", last[1]).split()

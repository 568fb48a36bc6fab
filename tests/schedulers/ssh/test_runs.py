"""Training over real ssh, through the real CLI: what breaks on the way changes nothing of what is learnt."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from launcher.rundir.layout import RunDir
from launcher.rundir.shared_memory_folders import private_folder
from tests.lab import events, metrics, supervisor_pid, verdicts, wait_for
from tests.schedulers.ssh.conftest import on_two_hosts
from tests.schedulers.ssh.hosts import Laptop

pytestmark = pytest.mark.e2e

CANARY = "sesame-5d1e0a3b"
TASK = """
import os, time
from launcher.tasks.gpt import PydocGPT

print("token of", len(os.environ["TOKEN"]))

class Mine(PydocGPT):
    def loss(self, model, batch):
        time.sleep(float(os.environ["PACE"]))
        return super().loss(model, batch)
"""
STEPS = 12


def job(
    lab: Laptop, name: str, pace: float, steps: int = STEPS, sharding: str = "fsdp", **resources: int
) -> str:
    """Two ranks. The second one's memory runs out in step 3, once."""
    lab.script(TASK, "mine.py")
    env = {"PACE": str(pace), "TRAIN_MEMORY_FAIL": "rank=last,step=3,phase=backward,micro_batch=4"}
    fields = {
        "task": "mine:Mine",
        "args": {"layers": 1, "dim": 32, "heads": 2, "context": 32},
        "steps": steps,
        "train": {"checkpoint_every": 1, "lr": 1e-3},
        "recipe": {"sharding": sharding, "precision": "fp32"},
        "resources": {"gpus_per_node": 0, **resources},
        "secrets": ["TOKEN"],
    }
    return str(lab.job(f"job-{name}.yaml", **fields, env=env))


@dataclass
class Reference:
    """On one host, followed over a connection that breaks in mid-run."""

    lab: Laptop
    run: RunDir
    followed: str
    broken: dict[str, object]
    argv: str


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laptop]:
    with on_two_hosts(tmp_path_factory.mktemp("laptop")) as laptop:
        laptop.environ["TOKEN"] = CANARY
        yield laptop


@pytest.fixture(scope="module")
def reference(lab: Laptop) -> Reference:
    command = [
        sys.executable,
        "-m",
        "launcher",
        "run",
        job(lab, "one", 0.5, ranks_per_node=2),
        "-c",
        "one.yaml",
    ]
    follower = subprocess.Popen(
        command, cwd=lab.folder, env=lab.environ, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    (first,) = wait_for(lambda: list(lab.runs.glob("[!.]*/attempts/000")), "attempt")
    there = RunDir(first.parents[1])
    wait_for(lambda: len(metrics(there)) > 3, "step after the downgrade")
    argv = "\n".join(" ".join(_argv(pid)) for pid in psutil.pids())
    host = lab.hosts[0].sshd
    host.stop()
    broken = json.loads(lab.cli("status", there.id, "--json").stdout)
    host.start()
    followed, _ = follower.communicate(timeout=240)
    return Reference(lab, lab.newest(), followed, broken, argv)


def _argv(pid: int) -> list[str]:
    try:
        return psutil.Process(pid).cmdline()
    except psutil.Error:
        return []


def test_a_broken_connection_harms_neither_the_run_nor_who_follows_it(reference: Reference) -> None:
    lab, run = reference.lab, reference.run
    assert reference.broken["state"] == "running"
    assert "last known state; cannot log in to tensor01" in str(reference.broken["reason"])
    assert f"step {STEPS}/{STEPS}" in reference.followed, reference.followed
    assert f"{run.id}: succeeded" in reference.followed
    status = lab.status(run)
    assert (status["state"], status["step"], status["checkpoint_step"]) == ("succeeded", STEPS, STEPS)
    assert status["handle"] == f"ssh:one:{run.id}"
    assert not run.path.is_relative_to(lab.disk), "a copy"
    assert run.events.read_text() == lab.on_disk(run).events.read_text()


def test_a_run_that_has_ended_is_read_while_its_host_is_down(reference: Reference) -> None:
    lab, run = reference.lab, reference.run
    fetched = lab.said("logs", run.id)
    host = lab.hosts[0].sshd
    host.stop()
    try:
        logs, report, watched = (
            lab.cli(*verb, run.id) for verb in (["logs"], ["report"], ["report", "--watch"])
        )
    finally:
        host.start()
    assert logs.returncode == report.returncode == watched.returncode == 0, logs.stderr + report.stderr
    assert logs.stdout == fetched and fetched
    for done in (logs, report, watched):
        assert "cannot log in to tensor01" in done.stderr and "the copy of" in done.stderr, done.stderr


def test_memory_that_runs_out_costs_a_rung_there(reference: Reference) -> None:
    run = reference.run
    assert [verdict["failure"] for verdict in verdicts(run)] == ["succeeded"]
    (down,) = events(run, "downgrade")
    assert (down["in_process"], down["rank"], down["step"]) == (True, 1, 3)
    assert down["changes"] == {"micro_batch_size": [4, 2], "grad_accum": [1, 2]}
    assert "micro-batch 4 -> 2" in reference.lab.said("why", run.id)


@pytest.mark.slow
def test_memory_that_runs_out_where_no_step_can_be_repeated_costs_a_restart_there(lab: Laptop) -> None:
    """DDP: all ranks end, and the supervisor on the host starts them again one rung lower."""
    file = job(lab, "ddp", 0, steps=5, sharding="ddp", ranks_per_node=2)
    run = lab.submit(file, "-c", "one.yaml")
    there = lab.on_disk(run)
    assert lab.wait(run)["state"] == "succeeded", lab.all_logs(there)
    assert [(one["failure"], one["step"]) for one in verdicts(run)] == [("gpu-oom", 3), ("succeeded", None)]
    (down,) = events(run, "downgrade")
    assert not down["in_process"] and down["changes"]["micro_batch_size"] == [4, 2]
    assert [event["step"] for event in events(run, "resumed")] == [2]
    assert [line["step"] for line in metrics(there)] == [1, 2, 3, 4, 5]
    assert "micro-batch 4 -> 2" in lab.said("why", run.id)


def test_a_secret_of_the_laptop_reaches_the_ranks_and_nothing_else(reference: Reference) -> None:
    lab, run = reference.lab, reference.run
    assert f"token of {len(CANARY)}" in lab.said("logs", run.id)
    assert "launcher.train" in reference.argv and CANARY not in reference.argv
    written = [lab.folder, lab.home, *(host.folder for host in lab.hosts)]
    files = [file for folder in written for file in folder.rglob("*") if file.is_file()]
    assert lab.on_disk(run).events in files
    assert [str(file) for file in files if CANARY.encode() in file.read_bytes()] == []


@pytest.mark.thorough
def test_two_hosts_cancelled_and_resumed_end_with_the_weights_of_one(
    lab: Laptop, reference: Reference
) -> None:
    run = lab.submit(job(lab, "two", 0.3, nodes=2, ranks_per_node=1), "-c", "both.yaml")
    there = lab.on_disk(run)
    wait_for(lambda: len(metrics(there)) > 5, "some steps")
    assert "running" in lab.said("list")
    lab.said("cancel", run.id)
    cancelled = lab.wait(run)
    assert cancelled["state"] == "cancelled" and 3 <= cancelled["checkpoint_step"] < STEPS, lab.all_logs(
        there
    )
    assert "not running: cancelled" in lab.said("cancel", run.id, code=4)
    followed = lab.said("resume", run.id, "--follow")
    assert f"{run.id}: succeeded" in followed, lab.all_logs(there)
    assert [event["step"] for event in events(run, "resumed")][-1] == cancelled["checkpoint_step"]
    assert [event["nodes"] for event in events(run, "started")] == [2, 2]
    assert len(list(there.path.glob("attempts/*/logs/node-01/rank-001.out"))) == len(run.attempts())
    assert lab.weights(run) == lab.weights(reference.run)


WAITS = """
import os, pathlib, sys, time
print("here", os.environ.get("MOOD", "as ever"), flush=True)
file = pathlib.Path(os.environ["LAUNCHER_RUN_DIR"]) / "go"
while not file.exists():
    time.sleep(0.1)
"""


def other_supervisor(there: RunDir) -> int:
    return int(json.loads((there.path / "supervisor.01.lock").read_text())["pid"])


def waiting(lab: Laptop, nodes: int, profile: str) -> RunDir:
    """A run whose ranks, one on each host, wait for a file `go`."""
    lab.script(WAITS)
    resources = {"nodes": nodes, "gpus_per_node": 0, "ranks_per_node": 1}
    job = lab.job("job-waits.yaml", command="python train.py", resources=resources)
    run = lab.submit(str(job), "-c", profile)
    there = lab.on_disk(run)

    def here() -> bool:
        files = there.path.glob("attempts/*/logs/*/rank-*.out")
        return sum("here" in file.read_text() for file in files) == nodes

    wait_for(here, "the ranks")
    return run


@pytest.mark.thorough
def test_a_supervisor_that_is_gone_without_a_word_is_lost_and_the_run_goes_on(lab: Laptop) -> None:
    run = waiting(lab, 1, "one.yaml")
    there = lab.on_disk(run)
    os.kill(supervisor_pid(there), 9)
    status = lab.status(run)
    assert (status["state"], status["failure"], status["resumable"]) == ("lost", "node-failed", True)
    away = there.path.rename(there.path.with_name("away"))
    gone = lab.status(run)
    assert (gone["state"], gone["resumable"]) == ("lost", False) and "no longer exists" in gone["reason"]
    assert "launcher resume" not in lab.said("why", run.id)
    away.rename(there.path)
    assert "not running: lost" in lab.said("cancel", run.id, code=4)
    (there.path / "go").touch()
    followed = lab.said("resume", run.id, "--set", "env.MOOD=better", "--follow")
    assert "here better" in followed and f"{run.id}: succeeded" in followed, lab.all_logs(there)
    assert "here as ever" in lab.said("logs", run.id)
    left = private_folder(Path(f"/dev/shm/launcher-{os.getuid()}")) / f"{run.id}-01234567"
    left.mkdir()
    lab.said("clean", run.id, "--yes")
    assert not run.path.exists() and not there.path.exists() and not left.exists()


@pytest.mark.thorough
def test_of_two_hosts_what_is_left_on_the_second_ends_before_the_run_goes_on(lab: Laptop) -> None:
    run = waiting(lab, 2, "both.yaml")
    there = lab.on_disk(run)
    other = other_supervisor(there)
    os.kill(supervisor_pid(there), 9)
    assert lab.status(run)["state"] == "lost" and psutil.pid_exists(other)
    (there.path / "go").touch()
    assert f"{run.id}: succeeded" in lab.said("resume", run.id, "--follow"), lab.all_logs(there)
    assert not psutil.pid_exists(other) and lab.said("logs", run.id, "--node", "1").count("here") == 2


@pytest.mark.thorough
def test_a_host_that_drops_out_interrupts_the_run(lab: Laptop) -> None:
    """No batch system starts it again, so the first one does not wait for it in vain."""
    run = waiting(lab, 2, "both.yaml")
    os.kill(other_supervisor(lab.on_disk(run)), 9)
    status = lab.wait(run)
    assert (status["state"], status["failure"]) == ("interrupted", "node-failed"), status
    assert [event["then"] for event in events(run, "ended")] == ["node 1 has no supervisor any more"]
    (lab.on_disk(run).path / "go").touch()
    assert f"{run.id}: succeeded" in lab.said("resume", run.id, "--follow")

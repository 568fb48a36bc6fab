"""A real cluster behind a real sshd: the laptop knows nothing of Slurm but the login node's name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.rundir.layout import RunDir
from launcher.spec.verdict import EXIT_CODES
from tests.lab import events, metrics, wait_for
from tests.schedulers.sshd import Sshd
from tests.slurm.lab import GPT, job_id
from tests.slurm.laptop import Laptop
from tests.slurm.test_runs import ONE_RANK, Told, tells

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def lab_in(laptops: Callable[[Path], Laptop]) -> Callable[[Path], Laptop]:
    return laptops


def to_the_end(lab: Laptop) -> Told:
    """The task lies in a file that was changed and not committed, and changes again after submission."""
    lab.edition(2)
    resources = {"nodes": 2, "ranks_per_node": 1}
    secrets = [{"name": "TOKEN", "env": "CLUSTER_TOKEN"}]
    job = lab.job(**GPT | {"task": "mine:Mine"}, resources=resources, secrets=secrets)
    before = lab.sshd.sessions
    run = lab.submit(str(job))
    trips = {"submit": lab.sshd.sessions - before}
    lab.edition(3)
    followed = lab.said("logs", run.id, "-f", timeout=240)
    status = lab.status(run)
    before = lab.sshd.sessions
    lab.said("list")
    shown = lab.said("status", run.id)
    trips["list and status of a run that has ended"] = lab.sshd.sessions - before
    return Told(lab, run, status, {"followed": followed, "shown": shown, "trips": trips})


@tells(to_the_end)
def test_uncommitted_work_trains_on_two_nodes_and_its_lines_come_as_they_are_written(it: Told) -> None:
    assert (it.status["state"], it.status["step"]) == ("succeeded", 12), it.lab.all_logs(it.run)
    assert not it.run.path.is_relative_to(it.lab.there), "a copy"
    followed = it.more["followed"]
    assert "edition 2 token of 13" in followed and "edition 3" not in followed
    assert "sesame" not in followed and not any(
        "sesame" in file.read_text(errors="replace") for file in it.lab.on_disk(it.run).path.glob("*.*")
    )
    assert len(it.losses) == 12
    assert it.more["trips"] == {"submit": 4, "list and status of a run that has ended": 0}
    assert f"{it.lab.sshd.host}:{it.lab.on_disk(it.run).path}" in it.more["shown"]
    only = it.lab.said("logs", it.run.id, "--rank", "1")
    assert "edition 2" in only and "rank 0" not in only
    ((state, nodes),) = it.lab.accounted(job_id(it.run), "NNodes")
    assert (state, nodes) == ("COMPLETED", "2")


def cancelled_and_resumed(lab: Laptop) -> Told:
    env = {"PACE": "1.5", "TRAIN_MEMORY_BUDGET": "64MiB"}
    fields = {**GPT, "task": "mine:Mine", "steps": 80, "train": {"checkpoint_every": None, "lr": 1e-3}}
    run = lab.submit(str(lab.job(**fields, env=env, resources=ONE_RANK)))
    there = lab.on_disk(run)
    wait_for(lambda: len(metrics(there)) > 2, "some steps")
    asked = lab.json("snapshot", run.id)
    host, _, folder = asked["folder"].partition(":")
    wait_for(lambda: list(Path(folder).glob("*-step-*.json")), f"snapshot in {asked}")
    listed = lab.json("list")[0]["state"]
    before = lab.sshd.sessions
    lab.said("cancel", run.id)
    trips = [lab.sshd.sessions - before]
    cancelled = lab.wait(run)
    before = lab.sshd.sessions
    lab.said("resume", run.id)
    trips.append(lab.sshd.sessions - before)
    more = {"cancelled": cancelled, "host": host, "listed": listed, "trips": trips}
    return Told(lab, run, lab.wait(run), more)


@pytest.mark.slow
@tells(cancelled_and_resumed)
def test_a_run_that_is_cancelled_and_resumed_goes_on_from_its_checkpoint(it: Told) -> None:
    cancelled, lab = it.more["cancelled"], it.lab
    assert (it.more["listed"], it.more["host"]) == ("running", lab.sshd.host)
    assert cancelled["state"] == "cancelled" and cancelled["checkpoint_step"] >= 3
    assert it.status["state"] == "succeeded", lab.all_logs(it.run)
    assert [event["step"] for event in events(it.run, "resumed")] == [cancelled["checkpoint_step"]]
    assert sorted(it.losses) == list(range(1, 81))
    assert it.run.events.read_text() == lab.on_disk(it.run).events.read_text()
    assert (lab.sshd.logins, it.more["trips"]) == (1, [1, 1])
    said = lab.said("export", it.run.id, "--to", "weights", code=4)
    assert f"launcher export {lab.on_disk(it.run).path}" in said


def cancelled_in_the_queue(lab: Laptop) -> Told:
    lab.profile(extra={"begin": "now+1hour"})
    run = lab.submit(str(lab.job(**GPT, resources=ONE_RANK)))
    before = lab.sshd.sessions
    said = lab.said("cancel", run.id)
    trips = lab.sshd.sessions - before
    return Told(lab, run, run.read_state().as_json(), {"said": said, "trips": trips})


@pytest.mark.slow
@tells(cancelled_in_the_queue)
def test_a_job_that_is_cancelled_in_the_queue_is_known_to_have_ended(it: Told) -> None:
    assert "taken out of the queue" in it.more["said"] and it.more["trips"] == 2
    assert (it.status["state"], it.status["failure"]) == ("cancelled", "cancelled")
    assert it.lab.said("status", it.run.id, code=EXIT_CODES["cancelled"])


def mended(lab: Laptop) -> Told:
    """A program that fails; then another one, and another job."""
    lab.script(
        "import os, sys\n"
        "print('mood', os.environ['MOOD'])\n"
        "print('train.py: error: bad mood', file=sys.stderr)\n"
        "sys.exit(3)\n"
    )
    job = lab.job(command="python train.py", env={"MOOD": "bad"}, resources=ONE_RANK)
    lab.said("run", str(job), "-c", "lab.yaml", code=EXIT_CODES["user-error"])
    run = lab.newest()
    why = lab.said("why", run.id)
    lab.profile("elsewhere.yaml", runs="elsewhere")
    refused = lab.said("resume", run.id, "-c", "elsewhere.yaml", code=4)
    lab.script("import os; print('mended, mood', os.environ['MOOD'])")
    followed = lab.said("resume", run.id, "--set", "env.MOOD=good", "--follow")
    return Told(lab, run, lab.status(run), {"why": why, "refused": refused, "followed": followed})


@pytest.mark.slow
@tells(mended)
def test_a_run_is_resumed_with_mended_code_and_never_in_another_place(it: Told) -> None:
    assert it.status["state"] == "succeeded" and "mended, mood good" in it.more["followed"]
    assert "exit code 3" in it.more["why"]
    assert f"{it.lab.sshd.host}:{it.lab.there}/runs" in it.more["refused"]
    assert it.lab.on_disk(it.run).read_state().state == "succeeded"
    it.lab.said("clean", it.run.id, "--yes")
    assert not it.run.path.exists() and not it.lab.on_disk(it.run).path.exists()


def array(lab: Laptop) -> Told:
    lab.script("import os; print('I am', os.environ['WHO'])")
    job = lab.job(command="python train.py", resources=ONE_RANK, env={"WHO": "?"})
    before = lab.sshd.sessions
    lab.said("submit", str(job), "-c", "lab.yaml", "--sweep", "env.WHO=a,b")
    trips = lab.sshd.sessions - before
    runs = [RunDir(Path(one["path"])) for one in lab.json("list")]
    ended = [(run, lab.wait(run)) for run in runs]
    return Told(lab, runs[0], {}, {"ended": ended, "trips": trips})


@pytest.mark.slow
@tells(array)
def test_a_sweep_is_one_array_and_its_runs_can_be_watched_alone(it: Told) -> None:
    ended = it.more["ended"]
    assert [status["state"] for _, status in ended] == ["succeeded"] * 2, it.lab.all_logs(it.run)
    assert it.more["trips"] == 3, "checks, code, submission"
    assert len({job_id(run).partition("_")[0] for run, _ in ended}) == 1
    for run, _ in ended:
        who = run.read_about().job.validated().env["WHO"]
        assert f"I am {who}" in it.lab.said("logs", run.id)


def cancelled_sweep(lab: Laptop) -> Told:
    """One task trains, the others wait."""
    env = {"PACE": "0.5"}
    job = lab.job(**GPT | {"task": "mine:Mine", "steps": 9999}, env=env, resources=ONE_RANK)
    asked = ["--sweep", "seed=0,1,2,3,4,5", "--at-once", "1"]
    out = lab.said("submit", str(job), "-c", "lab.yaml", *asked)
    (sweep,) = (line.split()[-1] for line in out.splitlines() if line.startswith("all of them: "))
    runs = [RunDir(Path(one["path"])) for one in lab.json("status", sweep)["runs"]]
    wait_for(lambda: len(metrics(lab.on_disk(runs[0]))) > 2, "some steps")
    said, trips = {}, {}
    for name, command in (("status", ["status", sweep]), ("cancel", ["cancel", sweep])):
        before = lab.sshd.sessions
        said[name] = lab.said(*command)
        trips[name] = lab.sshd.sessions - before
    ended = lab.wait(runs[0])
    said["states"] = lab.said("status", sweep, code=EXIT_CODES["cancelled"])
    lab.said("clean", sweep, "--yes")
    left = [path.name for path in (lab.there / "runs").rglob("*") if sweep in str(path)]
    return Told(lab, runs[0], ended, {"said": said, "trips": trips, "left": left, "sweep": sweep})


@pytest.mark.slow
@tells(cancelled_sweep)
def test_a_sweep_is_cancelled_in_one_round_trip_and_leaves_nothing_when_deleted(it: Told) -> None:
    said, sweep = it.more["said"], it.more["sweep"]
    assert it.more["trips"] == {"status": 1, "cancel": 1}
    assert f"{sweep}: 5 submitted, 1 running" in said["status"]
    assert f"{sweep}: 5 taken out of the queue, 1 asked to write a checkpoint and stop" in said["cancel"]
    assert it.status["state"] == "cancelled" and it.status["checkpoint_step"] >= 2
    assert f"{sweep}: 6 cancelled" in said["states"]
    assert it.more["left"] == []


def refused(lab: Laptop) -> dict[str, Any]:
    job = str(lab.job(**GPT))
    said: dict[str, Any] = {}
    lab.profile("wrong.yaml", partition="nowhere")
    said["partition"] = lab.said("submit", job, "-c", "wrong.yaml", code=4)
    said["secret"] = lab.said("submit", job, "-c", "lab.yaml", "--set", "secrets=[TOKEN]", code=4)
    secret_in_a_sweep = ["--sweep", "lr=1e-3,3e-4", "--set", "secrets=[TOKEN]"]
    said["sweep"] = lab.said("submit", job, "-c", "lab.yaml", *secret_in_a_sweep, code=4)
    said["runs"] = " ".join(path.name for path in (lab.there / "runs").glob("[!.]*"))
    said["queue"] = lab.slurm("squeue", "-h", "-t", "all", "-o", "%Z")
    said["listed"] = lab.json("list")
    said["detected"] = lab.said("clusters", "detect", "--login", lab.sshd.host, "--partition", "short")
    said["folder"] = str(lab.folder)
    return said


@pytest.mark.parametrize("it", [refused], indirect=True)
def test_what_cannot_run_there_is_refused_before_there_is_a_job(it: dict[str, Any]) -> None:
    assert "nowhere" in it["partition"] and "main" in it["partition"]
    assert "TOKEN is not set there" in it["secret"] and "the laptop's own" not in it["secret"]
    assert "TOKEN is not set there" in it["sweep"]
    assert it["runs"] == "" and it["folder"] not in it["queue"] and it["listed"] == []
    assert f"login: {Sshd.host}" in it["detected"] and "partition: short" in it["detected"]

"""Sweeps on RunPod: each run is a pod, and a process on this machine rents them in order."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("starlette")
pytest.importorskip("boto3")

from launcher.cli.main import app
from launcher.rundir.find import SweepRuns, find
from launcher.rundir.layout import RunDir
from launcher.schedulers.base import Status, UnclearError
from launcher.schedulers.runpod.queue import is_attended
from launcher.schedulers.runpod.request import PodPrepared
from launcher.schedulers.runpod.scheduler import RunPodScheduler
from launcher.schedulers.sweeps_without_queue import runs_of
from launcher.supervise.sweep_turn import sweep_folder
from launcher.top.board import Board
from tests.lab import wait_for
from tests.schedulers.runpod.runs import Lab


def call(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == code, done.output
    return done.output


def submit(lab: Lab, *arguments: str) -> tuple[str, list[RunDir]]:
    """A sweep of three runs."""
    lab.prepare(job={"env": {"N": "0"}})  # writes the job and the profile
    command = ["submit", str(lab.folder / "job.yaml"), "-c", str(lab.folder / "box.yaml")]
    said = call(*command, "--sweep", "env.N=1,2,3", *arguments)
    assert "3 runs, each with its own pod" in " ".join(said.split())
    found = find(said.rstrip().rpartition(" ")[2])
    assert isinstance(found, SweepRuns)
    return found.id, list(found.runs)


def folder(run: RunDir, sweep: str) -> Path:
    return sweep_folder(run, sweep)


def until(lab: Lab, run: RunDir, state: str) -> Status:
    """As `launcher list` sees it, which rents nothing."""
    wait_for(lambda: lab.scheduler.statuses([run])[0].state == state, f"{state} of {run.id}")
    return lab.scheduler.statuses([run])[0]


def test_a_pod_is_rented_when_another_has_ended_and_cancelled_runs_get_none(lab: Lab) -> None:
    sweep, runs = submit(lab, "--at-once", "1")
    until(lab, runs[0], "running")
    waiting = [lab.scheduler.statuses([run])[0] for run in runs[1:]]
    assert {(one.state, one.reason) for one in waiting} == {
        ("submitted", "waits for its turn in the sweep (--at-once 1)")
    }
    assert [lab.bill(run) for run in runs] == [1, 0, 0]
    board = Board()
    board.look()
    assert [(run.id, entry.status.state) for run, entry in board.entries.items()] == [
        (run.id, "submitted") for run in runs[:0:-1]
    ] + [(runs[0].id, "running")]
    lab.go(runs[0])
    until(lab, runs[1], "running")
    assert lab.scheduler.statuses([runs[0]])[0].state == "succeeded"
    call("sweep", "cancel", sweep)
    ended = [until(lab, run, "cancelled") for run in runs[1:]]
    assert ended[1].reason.startswith("cancelled while it waited for its turn")
    assert [lab.bill(run) for run in runs] == [1, 1, 0]
    wait_for(lambda: not is_attended(runs[0]), "the end of the process")
    call("clean", sweep, "-y")
    assert not folder(runs[0], sweep).exists()


def test_the_waiting_runs_of_a_killed_process_are_lost_and_resumed(lab: Lab) -> None:
    sweep, runs = submit(lab, "--at-once", "1")
    until(lab, runs[0], "running")
    os.kill(int((folder(runs[0], sweep) / "queue.lock").read_text()), signal.SIGKILL)
    wait_for(lambda: not is_attended(runs[0]), "the end of the process")
    assert [one.state for one in lab.scheduler.statuses(runs)] == ["running", "lost", "lost"]
    lab.go(runs[0])
    until(lab, runs[0], "succeeded")
    assert call("sweep", "resume", sweep).count("goes on") == 2
    for run in runs[1:]:
        until(lab, run, "running")
        lab.go(run)
    assert until(lab, runs[2], "succeeded").state == "succeeded"
    assert [lab.bill(run) for run in runs] == [1, 1, 1]
    assert runs_of(folder(runs[0], sweep)) == runs


def test_without_a_limit_each_run_has_its_pod_at_once(lab: Lab) -> None:
    _, runs = submit(lab, "--max-price", "5")
    for run in runs:
        until(lab, run, "running")
    assert [lab.bill(run) for run in runs] == [1, 1, 1]
    for run in runs:
        lab.go(run)
        until(lab, run, "succeeded")


def test_runs_before_one_that_cannot_be_submitted_go_on_and_are_attended(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = RunPodScheduler._put_in_line

    def fails(self: RunPodScheduler, prepared: PodPrepared) -> RunDir:
        if prepared.about.sweep.task == 2:
            raise UnclearError("no answer came")
        return put(self, prepared)

    monkeypatch.setattr(RunPodScheduler, "_put_in_line", fails)
    lab.prepare(job={"env": {"N": "0"}})
    command = ["submit", str(lab.folder / "job.yaml"), "-c", str(lab.folder / "box.yaml")]
    done = CliRunner().invoke(app, [*command, "--sweep", "env.N=1,2,3", "--at-once", "1"])
    said = str(done.exception)
    assert isinstance(done.exception, UnclearError), "exit code 5"
    assert "no answer came; 2 of 3 runs were started and go on: `launcher cancel " in said
    found = find(said.rpartition("`launcher cancel ")[2].split("`")[0])
    assert isinstance(found, SweepRuns) and len(found.runs) == 2
    assert all(is_attended(run) for run in found.runs)
    call("cancel", found.id)


def test_a_run_for_which_no_pod_can_be_had_keeps_its_turn_and_gets_one_later(lab: Lab) -> None:
    _, runs = submit(lab, "--at-once", "1", "--max-price", "0.15")
    until(lab, runs[0], "running")
    lab.sandbox.faults(price=1)  # above the limit, as RunPod says when it has rented the pod
    lab.go(runs[0])
    wait_for(
        lambda: [one for one in runs[1].read_events() if one.kind == "refused"], "a pod that was refused"
    )
    told = wait_for(lambda: _reason(lab, runs[1], "waits for a pod"), "the reason")
    assert "the limit is 0.150" in told and told.endswith("; launcher tries again")
    assert lab.scheduler.statuses([runs[2]])[0].reason == "waits for its turn in the sweep (--at-once 1)"
    lab.sandbox.faults()
    for run in runs[1:]:
        until(lab, run, "running")
        lab.go(run)
    until(lab, runs[2], "succeeded")


def _reason(lab: Lab, run: RunDir, begins: str) -> str | None:
    said = lab.scheduler.statuses([run])[0].reason
    return said if said.startswith(begins) else None

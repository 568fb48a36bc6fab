"""How long the ranks have at a request to stop, whatever the clocks of the nodes say."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from launcher.rundir.layout import RunDir
from launcher.rundir.stop import read_stop_request, write_cancel_request, write_stop_request
from launcher.supervise.attempt import Ended, NodePlace, RunningAttempt, start
from launcher.supervise.process import processes_of
from launcher.supervise.supervisor import LEAVE_SECONDS, Supervisor
from tests.lab import PATIENCE, Lab, events


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a Slurm profile."""
    lab = Lab(tmp_path_factory.mktemp("rendered"))
    (lab.folder / "one.yaml").write_text("name: one\nscheduler: slurm\nslurm: {gpu_request: none}\n")
    job = str(lab.job(task="m:T", steps=5))
    done = lab.cli("render", job, "-c", "one.yaml", "--out", "run")
    assert done.returncode == 0, done.stderr
    return lab.folder / "run"


@pytest.fixture
def run(rendered: Path, tmp_path: Path) -> RunDir:
    return RunDir(Path(shutil.copytree(rendered, tmp_path / "run")))


def test_a_node_whose_clock_is_an_hour_ahead_gives_its_ranks_as_long_as_the_others(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = run.path / "told"
    supervisor = Supervisor(run, NodePlace(1, 2), {}, told)
    ahead = time.time() + 3600
    monkeypatch.setattr(time, "time", lambda: ahead)
    told.write_text("preempted +40\n")
    before = time.monotonic()
    assert supervisor._requests(at_once=True) == ["preempted"]
    assert supervisor._kill_at is not None
    assert before <= supervisor._kill_at - (40 - LEAVE_SECONDS) <= time.monotonic()


def test_rank_0_reads_the_time_by_the_clock_of_its_own_node(run: RunDir) -> None:
    attempt = run.attempt(0)
    attempt.path.mkdir(parents=True)

    def ask(node: int, seconds: float) -> float:
        """Ask that node's ranks, and return when rank 0 reads that they are killed."""
        running = RunningAttempt(run, attempt, node, Mock(), Mock(), sends_sigterm=True)
        running.ask_to_stop("preempted", time.monotonic() + seconds)
        killed_at = read_stop_request(attempt.stop).killed_at
        assert killed_at is not None
        return killed_at

    theirs = ask(1, 3600 + 50)
    ours = ask(0, 50)
    assert ask(1, 3600 + 50) == ours < theirs - 3500


def test_a_script_that_an_earlier_version_has_rendered_tells_the_time_instead(run: RunDir) -> None:
    told = run.path / "told"
    supervisor = Supervisor(run, NodePlace(0, 1), {}, told)
    at = time.monotonic()
    told.write_text(f"preempted {time.time() + 40:.0f}\n")
    assert supervisor._requests(at_once=True) == ["preempted"]
    assert supervisor._kill_at is not None
    assert supervisor._kill_at - at == pytest.approx(40 - LEAVE_SECONDS, abs=2)


def test_a_stop_is_recorded_with_the_cause_that_the_batch_script_finds_out(run: RunDir) -> None:
    told, attempt = run.path / "told", run.attempt(0)
    attempt.path.mkdir(parents=True)
    supervisor = Supervisor(run, NodePlace(), {}, told)
    supervisor._stall = Mock(newly_stalled=lambda: False)

    def recorded() -> list[str]:
        supervisor._tick(attempt, Mock())
        return [event["reason"] for event in events(run, "stopping")]

    supervisor._on_signal(signal.SIGTERM, None)
    assert recorded() == [] and run.read_state().state == "stopping"
    told.write_text("node-failed +20\n")
    assert recorded() == ["node-failed"]
    run.cancel.write_text("now")
    supervisor._files_checked = 0.0  # as half a second later
    assert recorded() == recorded() == ["node-failed", "cancelled"]


def test_a_second_cancellation_counts_also_if_both_came_between_two_looks(run: RunDir) -> None:
    supervisor = Supervisor(run, NodePlace(), {})
    for _ in range(2):
        write_cancel_request(run.cancel)
    assert supervisor._requests(at_once=True) == ["cancelled"] * 2
    assert supervisor._requests(at_once=True) == []
    write_cancel_request(run.cancel)
    assert supervisor._requests(at_once=True) == ["cancelled"]
    run.cancel.write_text("by an earlier version\n")
    assert supervisor._requests(at_once=True) == ["cancelled"]
    run.cancel.unlink()
    assert supervisor._requests(at_once=True) == []


def test_the_job_s_output_names_the_cause_that_the_batch_script_finds_out(
    run: RunDir, capfd: pytest.CaptureFixture[str]
) -> None:
    """Slurm sends SIGTERM for a preemption and for `scancel` alike."""
    told, attempt = run.path / "told", run.attempt(0)
    attempt.path.mkdir(parents=True)
    supervisor = Supervisor(run, NodePlace(), {}, told)
    supervisor._stall = Mock(newly_stalled=lambda: False)
    supervisor._on_signal(signal.SIGTERM, None)
    supervisor._tick(attempt, Mock())
    told.write_text("cancelled +20\n")
    supervisor._files_checked = 0.0  # as half a second later
    supervisor._tick(attempt, Mock())
    said = capfd.readouterr().err
    assert "[launcher] cancelled: the ranks have" in said and "preempted" not in said


def test_a_stop_that_every_node_is_asked_for_is_recorded_once(run: RunDir) -> None:
    attempt = run.attempt(0)
    attempt.path.mkdir(parents=True)
    nodes = [Supervisor(run, NodePlace(rank, 2, "10.0.0.1"), {}) for rank in (1, 0)]
    recorded, before = partial(events, run, "stopping"), list[Any]()
    for supervisor in nodes:
        supervisor._stall = Mock(newly_stalled=lambda: False)
        supervisor._on_signal(signal.SIGTERM, None)
        running = Mock(ask_to_stop=Mock(side_effect=lambda *_: before.extend(recorded())))
        supervisor._tick(attempt, running)
        running.ask_to_stop.assert_called_once()
        assert not before, "the ranks are asked first"
        if not supervisor.nodes.leader:
            assert run.read_state().state != "stopping", "node 0 may have written how the run ended"
        supervisor._record_requests(ended=True)
    assert [event["reason"] for event in recorded()] == ["preempted"]


def test_a_stop_that_only_another_node_was_asked_for_is_recorded_by_node_0(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = run.attempt(0)
    attempt.path.mkdir(parents=True)
    write_stop_request(attempt.stop, "preempted", time.time())
    supervisor = Supervisor(run, NodePlace(0, 2, "10.0.0.1"), {})
    monkeypatch.setattr(supervisor, "_run", lambda _: Ended(0))
    monkeypatch.setattr(
        supervisor.nodes, "wait_for_reports", lambda *_: ({1: {"exit_code": -1, "oom_kills": 0}}, ())
    )
    assert supervisor._run_to_end(attempt).stop_reason == "preempted"
    assert [event["reason"] for event in events(run, "stopping")] == ["preempted"]


def test_a_node_does_not_wait_for_torchrun_when_its_ranks_have_ended_for_the_failure_of_another(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun would wait minutes for the other node, whose torchrun has ended."""
    monkeypatch.setattr("launcher.supervise.attempt.FAILED_SECONDS", 3600.0)
    attempt = run.attempt(0)
    attempt.path.mkdir(parents=True)
    worker = f"{sys.executable} -m launcher.supervise.worker -- sleep 3600"
    (run.scripts / "start.sh").write_text(f"RANK=0 {worker}\nsleep 3600\n")
    running, begun = start(run, attempt, NodePlace(0, 2), {}, sends_sigterm=True), time.monotonic()

    def tick() -> None:
        if processes_of(run.path, 0, of_ranks=True):
            running.end_failed()
        if time.monotonic() > begun + PATIENCE:
            os.killpg(running.process.pid, signal.SIGKILL)

    assert running.wait(tick).exit_code == -signal.SIGKILL
    assert time.monotonic() < begun + PATIENCE
    assert json.loads(attempt.exit(0).read_text())["exit_code"] == -signal.SIGHUP


def test_a_run_that_waits_longer_than_its_time_limit_still_waits_for_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(tmp_path)
    resources = {"gpus_per_node": 0, "ranks_per_node": 1, "time": 10}
    job = str(lab.job(command="true", resources=resources, recipe={}))
    done = lab.cli("render", job, "-c", "local", "--out", "run")
    assert done.returncode == 0, done.stderr
    supervisor = Supervisor(RunDir(lab.folder / "run"), NodePlace(), {})
    answers = ["", "waits for GPUs", "waits for GPUs"]
    monkeypatch.setattr("launcher.supervise.supervisor.Turn", lambda *_, **__: Mock(take=answers.pop))
    later = time.monotonic() + 60
    monkeypatch.setattr(time, "monotonic", lambda: later)
    supervisor._wait_for_turn()
    assert not answers

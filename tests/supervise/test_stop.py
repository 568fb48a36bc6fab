"""How long the ranks have at a request to stop, whatever the clocks of the nodes say."""

from __future__ import annotations

import json
import sys
import time
from unittest.mock import Mock

import pytest

from launcher.rundir.layout import RunDir
from launcher.rundir.stop import read_stop_request
from launcher.supervise.attempt import NodePlace, RunningAttempt
from launcher.supervise.supervisor import LEAVE_SECONDS, Supervisor
from tests.lab import Lab


@pytest.fixture
def run(lab: Lab) -> RunDir:
    """Of a Slurm profile. Its ranks never start."""
    (lab.folder / "clusters").mkdir()
    (lab.folder / "clusters/one.yaml").write_text(
        f"name: one\nscheduler: slurm\npaths: {{python: {json.dumps(sys.executable)}}}\n"
        "slurm: {gpu_request: none}\n"
    )
    rendered = lab.cli("render", str(lab.job(task="m:T", steps=5)), "-c", "one", "--out", "runs/asked")
    assert rendered.returncode == 0, rendered.stderr
    run = RunDir(lab.folder / "runs/asked")
    (run.scripts / "start.sh").write_text("exec sleep 60\n")
    return run


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
    assert supervisor._until is not None
    assert before <= supervisor._until - (40 - LEAVE_SECONDS) <= time.monotonic()


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
    assert supervisor._until is not None
    assert supervisor._until - at == pytest.approx(40 - LEAVE_SECONDS, abs=2)

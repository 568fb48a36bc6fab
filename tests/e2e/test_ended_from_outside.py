"""Supervisors that a scheduler ends, and starts again, before a rank could do anything."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from launcher.rundir.layout import RunDir
from launcher.supervise.policy import FRUITLESS
from tests.lab import Lab, verdicts, wait_for

pytestmark = pytest.mark.e2e


@pytest.fixture
def run(lab: Lab) -> RunDir:
    """Of a Slurm profile, where the scheduler starts a supervisor again."""
    (lab.folder / "clusters").mkdir()
    (lab.folder / "clusters/one.yaml").write_text(
        f"name: one\nscheduler: slurm\npaths: {{python: {json.dumps(sys.executable)}}}\n"
        "slurm: {gpu_request: none}\n"
    )
    rendered = lab.cli("render", str(lab.job(task="m:T", steps=5)), "-c", "one", "--out", "runs/ended")
    assert rendered.returncode == 0, rendered.stderr
    run = RunDir(lab.folder / "runs/ended")
    (run.scripts / "start.sh").write_text("exec sleep 60\n")  # as torchrun before its ranks
    return run


@contextmanager
def supervisor(lab: Lab, run: RunDir) -> Iterator[subprocess.Popen[bytes]]:
    """Until an attempt of it is running."""
    attempts = len(run.attempts())
    command = [
        sys.executable,
        "-m",
        "launcher.supervise",
        str(run.path),
        "--stop-file",
        str(run.path / "told"),
    ]
    process = subprocess.Popen(command, env=lab.environ)
    try:
        wait_for(lambda: len(run.attempts()) > attempts and _ranks(process), "rank")
        yield process
        process.wait(240)
    finally:
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("told", "failure", "state"),
    [
        ("cancelled", "cancelled", "cancelled"),
        ("node-failed", "node-failed", "interrupted"),
        ("", "preempted", "interrupted"),
    ],
)
def test_ranks_that_end_before_the_supervisor_heard_of_it_are_no_failure(
    lab: Lab, run: RunDir, told: str, failure: str, state: str
) -> None:
    with supervisor(lab, run) as process:
        os.kill(_ranks(process)[0], signal.SIGKILL)
        os.kill(process.pid, signal.SIGTERM)
        time.sleep(1.0)  # the batch script asks the controller why
        if told:
            (run.path / "told").write_text(told + "\n")
    assert verdicts(run)[0]["failure"] == failure
    assert run.read_state().state == state
    assert len(run.attempts()) == 1


@pytest.mark.slow
def test_a_run_that_saves_no_step_in_three_starts_stays_out_of_the_queue(lab: Lab, run: RunDir) -> None:
    for start in (1, 2, 3):
        with supervisor(lab, run) as process:
            process.send_signal(signal.SIGTERM)
        state = run.read_state()
        assert state.requeue == (start < 3) and (state.then == FRUITLESS) == (start == 3)


@pytest.mark.slow
def test_also_when_nobody_could_say_so(lab: Lab, run: RunDir) -> None:
    for _ in range(3):
        with supervisor(lab, run) as process:
            process.kill()
    command = [sys.executable, "-m", "launcher.supervise", str(run.path)]
    subprocess.run(command, env=lab.environ, timeout=240)
    assert (run.read_state().state, run.read_state().then) == ("failed", FRUITLESS)


def _ranks(supervisor: subprocess.Popen[bytes]) -> list[int]:
    return [child.pid for child in psutil.Process(supervisor.pid).children() if child.name() == "sleep"]

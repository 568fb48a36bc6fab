"""A scheduler that ends a job sends SIGTERM to all of it: to the supervisor and its ranks at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from launcher.runs.layout import RunDir
from tests.lab import Lab, verdicts, wait_for

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(
    ("told", "failure", "state"), [("cancelled", "cancelled", "cancelled"), ("", "preempted", "interrupted")]
)
def test_ranks_that_end_before_the_supervisor_heard_of_it_are_no_failure(
    lab: Lab, told: str, failure: str, state: str
) -> None:
    (lab.folder / "clusters").mkdir()
    (lab.folder / "clusters/one.yaml").write_text(
        f"name: one\nscheduler: slurm\npaths: {{python: {json.dumps(sys.executable)}}}\n"
        "slurm: {gpu_request: none}\n"
    )
    rendered = lab.cli("render", str(lab.job(command="true")), "-c", "one", "--out", "runs/ended")
    assert rendered.returncode == 0, rendered.stderr
    run = RunDir(lab.folder / "runs/ended")
    (run.scripts / "start.sh").write_text("exec sleep 60\n")  # as torchrun before it has its handlers
    stop_file = lab.folder / "stop"
    command = [sys.executable, "-m", "launcher.supervise", str(run.path), "--stop-file", str(stop_file)]
    supervisor = subprocess.Popen(command, env=lab.environ)
    try:
        wait_for(lambda: run.read_state().get("state") == "running" and _ranks(supervisor), "rank")
        for pid in (_ranks(supervisor)[0], supervisor.pid):
            os.kill(pid, signal.SIGTERM)
        time.sleep(1.0)  # the batch script asks the controller why
        if told:
            stop_file.write_text(told + "\n")
        supervisor.wait(30)
    finally:
        supervisor.kill()
    assert verdicts(run)[0]["failure"] == failure
    assert run.read_state()["state"] == state
    assert len(run.attempts()) == 1


def _ranks(supervisor: subprocess.Popen[bytes]) -> list[int]:
    return [child.pid for child in psutil.Process(supervisor.pid).children() if child.name() == "sleep"]

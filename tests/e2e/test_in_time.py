"""A run is to stop, and the step under way does not end in its time: no step that is done is lost."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from launcher.rundir.layout import RunDir
from tests.lab import Lab, events, metrics, supervisor_pid, verdicts, wait_for

pytestmark = pytest.mark.e2e

STUCK = """
import os, pathlib, time
from launcher.tasks.gpt import PydocGPT

RUN = pathlib.Path(os.environ["LAUNCHER_RUN_DIR"])

class Stuck(PydocGPT):
    "Rank 0 comes to no end of its third step."
    steps = 0
    def loss(self, model, batch):
        Stuck.steps += model.training
        if Stuck.steps == 3 and os.environ["RANK"] == "0":
            (RUN / "stuck").touch()
            while not (RUN / "go").exists():
                time.sleep(0.02)
        return super().loss(model, batch)
"""
SECONDS = 60
"Until the ranks are killed. Half of it is enough to start them once more, on a busy machine as well."


def stuck(lab: Lab, **train: Any) -> RunDir:
    lab.script(STUCK, "stuck.py")
    job = {
        "task": "stuck:Stuck",
        "args": {"layers": 1, "dim": 32, "heads": 2, "context": 32},
        "recipe": {"sharding": "fsdp", "micro_batch_size": 4},
        "steps": 500,
        "stop_timeout": SECONDS,
    }
    run = lab.submit(str(lab.job(**job, train={"checkpoint_every": None, **train})))
    wait_for((run.path / "stuck").exists, "third step")
    os.kill(supervisor_pid(run), signal.SIGTERM)
    return run


@pytest.mark.slow
def test_a_step_that_does_not_end_in_time_is_given_up_and_the_one_before_saved(lab: Lab) -> None:
    """Rank 1 waits in a collective for rank 0 meanwhile."""
    run = stuck(lab)
    status = lab.wait(run)
    assert (status["state"], status["failure"]) == ("interrupted", "preempted"), lab.all_logs(run)
    assert status["checkpoint_step"] == 2, lab.all_logs(run)
    assert verdicts(run)[0]["reason"].endswith("the current step was given up because no time was left")
    assert run.read_state().then.endswith("the state of step 2 was written as a checkpoint")
    (run.path / "go").touch()
    job = ["--set", "steps=4"]
    assert lab.cli("resume", str(run.path), *job, timeout=300).returncode == 0
    assert lab.wait(run)["state"] == "succeeded"
    assert [line["step"] for line in metrics(run)] == [1, 2, 3, 4]


@pytest.mark.slow
def test_where_nothing_would_be_saved_the_step_keeps_its_time(lab: Lab) -> None:
    run = stuck(lab, checkpoint_every=1)
    skipped = wait_for(lambda: events(run, "handover-skipped"), "try", timeout=2 * SECONDS)
    assert skipped[0]["reason"] == "the checkpoint of step 2 is as new"
    (run.path / "go").touch()
    status = lab.wait(run)
    assert (status["failure"], status["checkpoint_step"]) == ("preempted", 3), lab.all_logs(run)
    assert verdicts(run)[0]["reason"].endswith("a checkpoint was written")

"""`launcher cancel` around a stop that has another reason: a checkpoint in progress is worth waiting for."""

from __future__ import annotations

import os
import signal

import pytest

from launcher.rundir.layout import RunDir
from tests.lab import HELD, HELD_JOB, Lab, events, supervisor_pid, verdicts, wait_for

pytestmark = pytest.mark.e2e


def in_a_long_step(lab: Lab) -> RunDir:
    lab.script(HELD, "held.py")
    resources = {"gpus_per_node": 0, "ranks_per_node": 1}
    run = lab.submit(str(lab.job(**HELD_JOB, resources=resources, recipe="auto")))
    wait_for((run.path / "held").exists, "first step")
    return run


def stop(lab: Lab, run: RunDir, how: signal.Signals | None) -> None:
    """By a signal, or by `launcher cancel`; returns when the supervisor has heard of it."""
    before = len(events(run, "stopping"))
    if how is None:
        assert lab.cli("cancel", run.id).returncode == 0
    else:
        os.kill(supervisor_pid(run), how)
    wait_for(lambda: len(events(run, "stopping")) > before, "request to stop")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"), [(signal.SIGUSR2, None), (signal.SIGTERM, None), (None, signal.SIGUSR2)]
)
def test_a_first_cancel_beside_a_stop_for_another_reason_costs_no_checkpoint(
    lab: Lab, first: signal.Signals | None, second: signal.Signals | None
) -> None:
    run = in_a_long_step(lab)
    stop(lab, run, first)
    stop(lab, run, second)
    (run.path / "go").touch()
    status = lab.wait(run)
    assert (status["state"], status["failure"], status["checkpoint_step"]) == ("cancelled", "cancelled", 1)
    assert verdicts(run)[0]["reason"] == "cancelled by the user; a checkpoint was written"


@pytest.mark.slow
def test_a_second_cancel_ends_the_ranks_whatever_they_were_asked_before(lab: Lab) -> None:
    run = in_a_long_step(lab)
    for how in (signal.SIGUSR2, None, None):
        stop(lab, run, how)
    status = lab.wait(run)
    assert (status["state"], status["checkpoint_step"]) == ("cancelled", None)
    assert verdicts(run)[0]["reason"] == "cancelled by the user; ranks that did not end in time were killed"

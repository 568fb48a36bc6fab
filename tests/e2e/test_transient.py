"""Memory that ran out once and has room again: the run comes back up, and so do the next ones."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.spec.events import Climb, Downgrade
from launcher.train.recovery.fallback import CLIMB_AFTER
from tests.lab import Lab, events, metrics, wait_for

pytestmark = pytest.mark.e2e

# At the eighth loss of 32 samples 64 MiB are taken: once, or in each process where "stays" is there.
TASK = """\
import os, time
import torch
from torch import nn
from launcher.train import Task

class Regression(Task):
    losses = 0

    def model(self):
        return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))

    def data(self, split):
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(64, 16, generator=generator)
        return torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))

    def loss(self, model, batch):
        inputs, targets = batch
        time.sleep(float(os.environ.get("PACE", 0)))
        Regression.losses += len(inputs) == 32
        if Regression.losses == 8 and len(inputs) == 32 and os.path.exists("shortage"):
            if not os.path.exists("stays"):
                os.unlink("shortage")
            torch.ones(16 * 2**20)
        return (model(inputs) - targets).square().sum(), len(inputs)
"""
JOB: dict[str, Any] = {
    "task": "regression:Regression",
    "batch": {"global": 32},
    "recipe": {"precision": "fp32"},
    "resources": {"gpus_per_node": 0, "ranks_per_node": 1},
    "env": {"TRAIN_MEMORY_BUDGET": "48MiB"},
}


@pytest.mark.slow
def test_a_shortage_that_passed_lowers_no_later_run_for_ever(lab: Lab) -> None:
    lab.script(TASK, "regression.py")
    lab.script("", "shortage")
    job = str(lab.job(**JOB, steps=20))
    assert lab.cli("run", job).returncode == 0
    [down] = events(lab.newest(), "downgrade")
    assert down["in_process"] and down["changes"]["micro_batch_size"] == [32, 16]

    plan = lab.cli("submit", job, "--dry-run").stdout
    assert "micro-batch 16 x accumulation 2" in plan and "the run tries them again if nothing fails" in plan
    done = lab.cli("run", job, "--set", f"steps={CLIMB_AFTER + 10}")
    assert done.returncode == 0, done.stdout + done.stderr
    run = lab.newest()
    [up] = events(run, "climb")
    assert up["step"] == CLIMB_AFTER and up["changes"]["micro_batch_size"] == [16, 32]
    assert not events(run, "downgrade") and len(metrics(run)) == CLIMB_AFTER + 10
    assert "micro-batch 32 x accumulation 1" in lab.cli("submit", job, "--dry-run").stdout


@pytest.mark.thorough
def test_what_runs_out_in_a_second_run_is_not_tried_a_third_time(lab: Lab) -> None:
    lab.script(TASK, "regression.py")
    lab.script("", "shortage")
    lab.script("", "stays")
    job = str(lab.job(**JOB, steps=CLIMB_AFTER + 20))
    found = []
    for steps in (20, CLIMB_AFTER + 20, CLIMB_AFTER + 20):
        done = lab.cli("run", job, "--set", f"steps={steps}")
        assert done.returncode == 0, done.stdout + done.stderr
        run = lab.newest()
        changes = [one for one in run.read_events() if isinstance(one, Downgrade | Climb)]
        found.append([(one.kind, one.step < CLIMB_AFTER) for one in changes])
    assert found == [[("downgrade", True)], [("climb", False), ("downgrade", False)], []]
    assert (
        run.id not in (plan := lab.cli("submit", job, "--dry-run").stdout) and "tries them again" not in plan
    )


@pytest.mark.thorough
def test_the_second_chance_is_kept_when_somebody_resumes_the_run(lab: Lab) -> None:
    lab.script(TASK, "regression.py")
    lab.script("", "shortage")
    slow = {"env": {**JOB["env"], "PACE": "0.03"}, "train": {"checkpoint_every": 20}}
    run = lab.submit(str(lab.job(**{**JOB, **slow}, steps=100_000)))
    wait_for(lambda: events(run, "checkpoint"), "checkpoint")
    assert lab.cli("cancel", run.id).returncode == 0
    lab.wait(run, "cancelled")
    [down] = events(run, "downgrade")
    assert not events(run, "climb"), "it was cancelled in time"
    assert lab.cli("resume", run.id).returncode == 0
    [up] = wait_for(lambda: events(run, "climb"), "climb")
    assert up["step"] == down["step"] + CLIMB_AFTER
    lab.cli("cancel", run.id)
    lab.wait(run, "cancelled")

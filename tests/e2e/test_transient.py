"""Memory that ran out once and has room again: the run comes back up, and so do the next ones."""

from __future__ import annotations

import pytest

from launcher.train.recovery.descent import CLIMB_AFTER
from tests.lab import Lab, events, metrics

pytestmark = pytest.mark.e2e

# 64 MiB are taken once, by what is gone afterwards.
TASK = """\
import os
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
        Regression.losses += 1
        if Regression.losses == 8 and os.path.exists("shortage"):
            os.unlink("shortage")
            torch.ones(16 * 2**20)
        return (model(inputs) - targets).square().sum(), len(inputs)
"""
JOB = {
    "task": "regression:Regression",
    "batch": {"global": 32},
    "recipe": {"precision": "fp32"},
    "resources": {"gpus_per_node": 0, "ranks_per_node": 1},
    "env": {"TRAIN_MEMORY_BUDGET": "48MiB"},
}


def test_a_shortage_that_passed_lowers_no_later_run_for_ever(lab: Lab) -> None:
    lab.script(TASK, "regression.py")
    lab.script("", "shortage")
    job = str(lab.job(**JOB, steps=20))
    assert lab.cli("run", job).returncode == 0
    [down] = events(lab.newest(), "downgrade")
    assert down["in_process"] and down["changes"]["micro_batch_size"] == [32, 16]

    plan = lab.cli("submit", job, "--dry-run").stdout
    assert (
        "micro-batch 16 x accumulation 2" in plan and "which the run tries again when nothing fails" in plan
    )
    done = lab.cli("run", job, "--set", f"steps={CLIMB_AFTER + 10}")
    assert done.returncode == 0, done.stdout + done.stderr
    run = lab.newest()
    [up] = events(run, "climb")
    assert up["step"] == CLIMB_AFTER and up["changes"]["micro_batch_size"] == [16, 32]
    assert not events(run, "downgrade") and len(metrics(run)) == CLIMB_AFTER + 10
    assert "micro-batch 32 x accumulation 1" in lab.cli("submit", job, "--dry-run").stdout

"""A model with BatchNorm whose job file does not say so."""

from __future__ import annotations

import json

import pytest

from launcher.spec.verdict import EXIT_CODES
from tests.lab import Lab, events, verdicts

pytestmark = pytest.mark.e2e

TASK = """
import torch
from torch import nn
from launcher.train import Task

class Normed(Task):
    def model(self):
        return nn.Sequential(nn.Linear(8, 65536), nn.BatchNorm1d(65536), nn.Linear(65536, 1))

    def data(self, split):
        return [(torch.randn(8), torch.randn(1)) for _ in range(64)]

    def loss(self, model, batch):
        x, y = batch
        return (model(x) - y).square().sum(), len(x)
"""


@pytest.mark.parametrize("probe", [pytest.param("never", marks=pytest.mark.slow), "auto"])
def test_a_downgrade_stops_at_a_micro_batch_of_two(lab: Lab, probe: str) -> None:
    """Parameters and gradients alone are more than the budget: no micro-batch fits."""
    lab.script(TASK, "normed.py")
    job = lab.job(
        task="normed:Normed",
        steps=2,
        recipe={"sharding": "none", "micro_batch_size": 8, "offload": "none"},
        resources={"gpus_per_node": 0, "ranks_per_node": 1},
        env={"TRAIN_MEMORY_BUDGET": "6MiB"},
        train={"probe": probe},
    )
    done = lab.cli("run", str(job))
    assert done.returncode == EXIT_CODES["gpu-oom"], done.stdout + done.stderr
    run = lab.newest()
    [verdict] = verdicts(run)
    tried = [event["changes"]["micro_batch_size"] for event in events(run, "downgrade")]
    if probe == "never":
        assert (verdict["phase"], tried) == ("backward", [[8, 4], [4, 2]]), "in one attempt"
        assert "the least here is 2" in verdict["then"]
    else:
        assert (verdict["phase"], tried) == ("probe", [])
        assert "no micro-batch fits" in verdict["then"]


@pytest.mark.slow
def test_a_micro_batch_of_one_is_refused_before_the_first_step_with_the_remedy(lab: Lab) -> None:
    lab.script(TASK, "normed.py")
    job = lab.job(task="normed:Normed", steps=2, recipe={"sharding": "ddp", "micro_batch_size": 1})
    done = lab.cli("run", str(job))
    assert done.returncode == EXIT_CODES["user-error"]
    run = lab.newest()
    assert [verdict["failure"] for verdict in verdicts(run)] == ["user-error"]
    exception = json.loads(run.attempt(0).error(0).read_text())["exception"]
    assert "1 of the model: BatchNorm has no variance" in exception
    assert "micro_batch_size: 2, grad_accum: 2" in exception

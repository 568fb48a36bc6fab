"""Jobs that fit, though not with the first rungs; and losses that a smaller micro-batch would change."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.spec.verdict import EXIT_CODES
from tests.lab import Lab, events, verdicts

pytestmark = pytest.mark.e2e

WIDE = """
import torch
from torch import nn
from launcher.train import Task

class Wide(Task):
    def model(self):
        return nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))

    def data(self, split):
        return [torch.randn(512) for _ in range(64)]

    def loss(self, model, batch):
        return model(batch).square().sum(), len(batch)
"""
PARAMETERS = 4  # MiB; as much of gradients, twice as much of states


def wide(lab: Lab, **fields: Any) -> Any:
    """Two ranks under DDP, in a budget between 4 and 5 times the parameters."""
    lab.script(WIDE, "wide.py")
    base = {"task": "wide:Wide", "steps": 3, "env": {"TRAIN_MEMORY_BUDGET": f"{PARAMETERS * 9 // 2}MiB"}}
    return lab.cli("run", str(lab.job(**{**base, **fields})))


@pytest.mark.slow
def test_under_ddp_the_probe_finds_that_only_grad_sync_each_fits(lab: Lab) -> None:
    recipe = {"sharding": "ddp", "micro_batch_size": 2, "offload": "none"}
    done = wide(lab, recipe=recipe)
    assert done.returncode == 0, done.stdout + done.stderr
    run = lab.newest()
    assert [verdict["failure"] for verdict in verdicts(run)] == ["succeeded"]
    [downgrade] = events(run, "downgrade")
    assert (downgrade["phase"], downgrade["in_process"]) == ("probe", True)
    assert downgrade["changes"] == {
        "micro_batch_size": [2, 1],
        "grad_accum": [2, 4],
        "grad_sync": ["last", "each"],
    }


@pytest.mark.slow
@pytest.mark.parametrize(("grad_sync", "ends"), [("last", "gpu-oom"), ("each", "succeeded")])
def test_that_budget_is_too_small_for_last_at_a_micro_batch_of_one(
    lab: Lab, grad_sync: str, ends: str
) -> None:
    recipe = {"sharding": "ddp", "micro_batch_size": 1, "offload": "none", "grad_sync": grad_sync}
    done = wide(lab, recipe=recipe, train={"probe": "never"}, retries={"lower": 0})
    assert done.returncode == EXIT_CODES[ends], done.stdout + done.stderr


CONTRASTIVE = """
import torch
from torch import nn
from torch.nn import functional
from launcher.train import Task

class Contrastive(Task):
    couples_samples = True

    def model(self):
        return nn.Linear(16, 16)

    def data(self, split):
        return [(torch.randn(16), torch.randn(16)) for _ in range(64)]

    def loss(self, model, batch):
        a, b = batch
        logits = model(a) @ model(b).T
        return functional.cross_entropy(logits, torch.arange(len(a)), reduction="sum"), len(a)
"""


def contrastive(lab: Lab, **fields: Any) -> Any:
    """One rank, where memory runs out as long as the micro-batch is 8; the job does not declare the loss."""
    lab.script(CONTRASTIVE, "contrastive.py")
    base = {
        "task": "contrastive:Contrastive",
        "steps": 2,
        "recipe": {"sharding": "none", "micro_batch_size": 8, "offload": "none"},
        "resources": {"gpus_per_node": 0, "ranks_per_node": 1},
        "env": {"TRAIN_MEMORY_FAIL": "phase=forward,micro_batch=8"},
    }
    return lab.cli("run", str(lab.job(**{**base, **fields})))


@pytest.mark.slow
def test_a_fixed_micro_batch_of_a_loss_that_couples_samples_is_not_lowered(lab: Lab) -> None:
    assert contrastive(lab).returncode == EXIT_CODES["gpu-oom"]
    run = lab.newest()
    [verdict] = verdicts(run)
    assert verdict["phase"] == "forward" and events(run, "downgrade") == []
    for told in (verdict["then"], verdict["why_not_in_process"], lab.cli("why").stdout):
        assert "recipe.micro_batch_size, which is lowered only with retries.lower_micro_batch: true" in told


@pytest.mark.slow
def test_neither_is_it_by_the_probe(lab: Lab) -> None:
    drill = {"TRAIN_MEMORY_FAIL": "phase=probe,micro_batch=8"}
    done = contrastive(lab, env=drill, train={"probe": "always"})
    assert done.returncode == EXIT_CODES["gpu-oom"], done.stdout + done.stderr
    run = lab.newest()
    [verdict] = verdicts(run)
    assert verdict["phase"] == "probe" and "retries.lower_micro_batch: true" in verdict["then"]
    assert events(run, "downgrade") == []


@pytest.mark.slow
def test_where_the_job_allows_it_the_words_say_what_it_costs(lab: Lab) -> None:
    done = contrastive(lab, retries={"lower_micro_batch": True})
    assert done.returncode == 0, done.stdout + done.stderr
    [downgrade] = events(lab.newest(), "downgrade")
    assert downgrade["in_process"] and downgrade["changes"]["micro_batch_size"] == [8, 4]
    words = "the loss couples samples: with a smaller micro-batch the objective may have changed"
    assert words in downgrade["reason"] and words in done.stdout and words in lab.cli("why").stdout


def test_it_gives_up_first_what_takes_a_restart_and_only_then_the_micro_batch(lab: Lab) -> None:
    done = contrastive(
        lab,
        recipe={"sharding": "none"},
        model={"couples_samples": True},
        env={"TRAIN_MEMORY_FAIL": "step=1,phase=forward,micro_batch=8"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = events(lab.newest(), "downgrade")
    assert (first["in_process"], first["changes"]) == (False, {"offload": ["none", "cpu-optimizer"]})
    assert "couples samples" in first["why_not_in_process"] and "objective" not in first["reason"]
    assert second["in_process"] and second["changes"]["micro_batch_size"] == [8, 4]
    assert "the objective may have changed" in second["reason"]


@pytest.mark.slow
def test_the_micro_batch_of_a_command_stays_too_where_the_job_says_so(lab: Lab) -> None:
    lab.script("raise RuntimeError('CUDA out of memory. Tried to allocate 20.00 GiB')\n")
    command = "python train.py {micro_batch_size} {grad_accum} {checkpoint_dir}"
    done = lab.cli("run", str(lab.job(command=command, retries={"lower_micro_batch": False})))
    assert done.returncode == EXIT_CODES["gpu-oom"]
    [verdict] = verdicts(lab.newest())
    assert "retries.lower_micro_batch: false keeps the micro-batch" in verdict["then"]

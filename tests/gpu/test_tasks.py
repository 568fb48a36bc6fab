"""The tasks that come with launcher, in tiny, on one GPU: the precisions and compiled blocks of real runs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab import Lab, metrics

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "recipe",
    [
        {"sharding": "fsdp", "precision": "bf16-mixed"},
        {"sharding": "none", "precision": "bf16", "activations": "checkpoint"},
        {"sharding": "none", "precision": "bf16-mixed", "compile": True},
    ],
    ids=["fsdp", "bf16", "compiled"],
)
@pytest.mark.parametrize(
    ("task", "args"),
    [
        ("llama:LanguageModel", {"context": 128}),
        ("brain:BrainAutoencoder", {"parts": 2}),
        ("video:VideoLanguageModel", {"max_frames": 6}),
        ("images:DigitClassifier", {}),
    ],
)
def test_a_tiny_task_learns(lab: Lab, task: str, args: dict[str, Any], recipe: dict[str, Any]) -> None:
    job = lab.job(
        task=f"launcher.tasks.{task}",
        args=args,
        batch={"global": 32},
        model={"batch_norm": True},
        resources={"gpus_per_node": 1},
        recipe=recipe,
        steps=30,
        train={"lr": 3e-3},
    )
    done = lab.cli("run", str(job), timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [line["loss"] for line in metrics(lab.newest())]
    assert losses[-1] < losses[0]

"""Tensor parallelism as users run it: through the CLI, and through out-of-memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from launcher.rundir.layout import RunDir
from launcher.spec.verdict import EXIT_CODES
from tests.lab import Lab, events, metrics, verdicts

pytestmark = pytest.mark.e2e

EXAMPLE = Path(__file__).parents[2] / "examples" / "brain-tiny.yaml"
WHY_NOT = "with tensor parallelism, the other ranks wait in a collective inside a layer"
STEPS = 6


def run(lab: Lab, name: str, code: int = 0, **fields: Any) -> RunDir:
    done = lab.cli("run", str(lab.job(f"{name}.yaml", name=name, **fields)))
    assert done.returncode == code, done.stdout + done.stderr + lab.all_logs(lab.newest())
    return lab.newest()


def losses(run: RunDir) -> list[float]:
    lines = metrics(run)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1)), "each step once"
    return [line["loss"] for line in lines]


@pytest.mark.slow
def test_the_autoencoder_on_four_ranks_that_share_its_layers_trains_as_on_one(lab: Lab) -> None:
    example = YAML(typ="safe").load(EXAMPLE.read_text())
    example |= {"epochs": None, "steps": 8, "train": {**example["train"], "eval_every": 8}}
    found = {}
    for ranks in (4, 1):
        recipe = {"precision": "fp32", "optimizer": "adamw", "sharding": "none", "tensor": ranks}
        resources = {"gpus_per_node": 0, "ranks_per_node": ranks}
        lab.job("brain.yaml", **{**example, "recipe": recipe, "resources": resources})
        ran = lab.submit("brain.yaml")
        assert lab.wait(ran)["state"] == "succeeded", lab.all_logs(ran)
        found[ranks] = metrics(ran)
    ours, theirs = found[4], found[1]
    assert len(ours) == 8 and ours[-1]["eval_loss"] == pytest.approx(theirs[-1]["eval_loss"], rel=1e-5)
    for name, most in (("loss", 1e-6), ("grad_norm", 1e-5), ("lr", 0)):
        assert [a[name] for a in ours] == pytest.approx([b[name] for b in theirs], rel=most), name
    assert [line["weight"] for line in ours] == [32] * 8, "each sample counts once"


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks",
    [pytest.param(2, id="tensor 2"), pytest.param(4, id="fsdp 2 x tensor 2", marks=pytest.mark.thorough)],
)
def test_out_of_memory_inside_a_layer_ends_in_a_restart_and_costs_no_step(ranks: int, lab: Lab) -> None:
    fields = {
        "task": "launcher.tasks.llama:LanguageModel",
        "args": {"context": 32},
        "batch": {"global": 4 * ranks},
        "steps": STEPS,
        "resources": {"gpus_per_node": 0, "ranks_per_node": ranks},
        "recipe": {
            "precision": "fp32",
            "optimizer": "adamw",
            "sharding": "fsdp" if ranks > 2 else "none",
            "tensor": 2,
            "micro_batch_size": 8,
        },
        "train": {"checkpoint_every": None, "probe": "always"},
    }
    undisturbed = run(lab, "undisturbed", **fields)
    drills = (
        "rank=last,step=2,phase=backward,allocation=20,attempt=0",
        "rank=all,step=4,phase=forward,allocation=30,attempt=1",
        "rank=first,step=5,phase=forward,allocation=40,attempt=2",
    )
    ours = run(lab, "disturbed", env={"TRAIN_MEMORY_FAIL": ";".join(drills)}, **fields)
    assert [(one["failure"], one["phase"], one["step"]) for one in verdicts(ours)] == [
        ("gpu-oom", "backward", 2),
        ("gpu-oom", "forward", 4),
        ("gpu-oom", "forward", 5),
        ("succeeded", None, None),
    ], lab.all_logs(ours)
    assert [one["reason"] for one in events(ours, "recovery-off")] == [WHY_NOT] * 4
    assert [one["reason"] for one in events(ours, "probe-skipped")] == [
        "with tensor parallelism no rank runs a step alone"
    ] * 4
    resumed = [(event["step"], event["from"]) for event in events(ours, "resumed")]
    assert resumed == [(step, "shared-memory") for step in (1, 3, 4)]
    assert losses(ours) == pytest.approx(losses(undisturbed), rel=1e-6)


@pytest.mark.thorough
def test_a_failure_in_a_backward_pass_that_updates_goes_back_to_the_checkpoint(lab: Lab) -> None:
    fields = {
        "task": "launcher.tasks.llama:LanguageModel",
        "args": {"context": 32},
        "batch": {"global": 8},
        "steps": STEPS,
        "recipe": {
            "precision": "fp32",
            "optimizer": "adamw",
            "sharding": "none",
            "tensor": 2,
            "optimizer_step": "backward",
            "micro_batch_size": 8,
        },
        "train": {"checkpoint_every": 2, "clip_norm": None},
    }
    undisturbed = run(lab, "undisturbed", **fields)
    drill = "rank=last,step=4,phase=backward,allocation=60,attempt=0"
    env = {"TRAIN_MEMORY_FAIL": drill}
    ours = run(lab, "disturbed", env=env, **fields)  # the next rung updates after two micro-batches
    assert [(event["step"], event["from"]) for event in events(ours, "resumed")] == [(2, "checkpoint")]
    assert [line["step"] for line in metrics(ours)] == [1, 2, 3, 3, 4, 5, 6], "the third was lost"
    last = {line["step"]: line["loss"] for line in metrics(ours)}
    assert list(last.values()) == pytest.approx(losses(undisturbed), rel=1e-6)


@pytest.mark.thorough
def test_a_run_that_may_not_step_down_keeps_its_last_step_and_goes_on_as_another_mesh(lab: Lab) -> None:
    fields = {
        "task": "launcher.tasks.llama:LanguageModel",
        "args": {"context": 32},
        "batch": {"global": 8},
        "steps": STEPS,
        "recipe": {"precision": "fp32", "optimizer": "adamw", "sharding": "none", "tensor": 2},
        "train": {"checkpoint_every": None},
    }
    undisturbed = run(lab, "undisturbed", **fields)
    drill = {"TRAIN_MEMORY_FAIL": "rank=last,step=4,phase=backward,allocation=20"}
    ours = run(lab, "disturbed", code=EXIT_CODES["gpu-oom"], env=drill, retries={"lower": 0}, **fields)
    assert (ours.checkpoints / "step-00000003").is_dir()
    changes = ("recipe.tensor=1", "recipe.sharding=fsdp", "env={}")
    done = lab.cli("resume", ours.id, "--follow", *(word for one in changes for word in ("--set", one)))
    assert done.returncode == 0, done.stdout + done.stderr + lab.all_logs(ours)
    assert losses(ours) == pytest.approx(losses(undisturbed), rel=1e-6)

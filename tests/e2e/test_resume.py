"""`launcher resume` with other ranks, another recipe, another cluster: real ranks over gloo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.rundir.layout import RunDir
from launcher.spec.verdict import EXIT_CODES
from tests.lab import Lab, events, metrics, verdicts, wait_for

pytestmark = pytest.mark.e2e

STEPS = 14
TASK = """
from launcher.tasks.gpt import PydocGPT

class Fails(PydocGPT):
    def __init__(self, after, **args):
        super().__init__(**args)
        self.left = after

    def loss(self, model, batch):
        self.left -= 1
        if self.left < 0:
            raise ValueError("as it was asked to")
        return super().loss(model, batch)
"""


def job(lab: Lab, after: int, **fields: Any) -> str:
    """One rank whose task raises after so many micro-batches; a checkpoint after each step."""
    lab.script(TASK, "fails.py")
    base = {
        "task": "fails:Fails",
        "args": {"after": after, "layers": 1, "dim": 32, "heads": 2, "context": 32},
        "steps": STEPS,
        "train": {"checkpoint_every": 1, "lr": 1e-3},
        "resources": {"gpus_per_node": 0, "ranks_per_node": 1},
        "recipe": "auto",
    }
    return str(lab.job(**{**base, **fields}))


def losses(run: RunDir) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in metrics(run)}


def content(run: RunDir) -> dict[Path, bytes]:
    """All files of a run that has ended. Its page is written after that."""
    wait_for(run.report.is_file, "page")
    return {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_run_goes_on_with_two_ranks_and_then_with_one_as_if_nothing_had_changed(lab: Lab) -> None:
    assert lab.cli("run", job(lab, 999)).returncode == 0
    undisturbed = losses(lab.newest())
    assert lab.cli("run", job(lab, 5)).returncode == EXIT_CODES["user-error"]
    run = lab.newest()
    submitted = {
        name: (run.path / name).read_bytes() for name in ("run.json", "plan.json", "scripts/start.sh")
    }

    two = lab.cli("resume", "-s", "resources.ranks_per_node=2", "-s", "args.after=4", "--follow")
    assert two.returncode == EXIT_CODES["user-error"], two.stdout + two.stderr
    assert "resources.ranks_per_node: 1 -> 2" in two.stdout and "goes on from step 5" in two.stdout
    one = lab.cli("resume", "-s", "resources.ranks_per_node=1", "-s", "args.after=999", "--follow")
    assert one.returncode == 0, one.stdout + one.stderr

    assert sorted(losses(run)) == list(range(1, STEPS + 1))
    assert len(metrics(run)) == STEPS, "each step once"
    assert losses(run) == pytest.approx(undisturbed, rel=1e-5)
    assert {step: losses(run)[step] for step in range(1, 6)} == {s: undisturbed[s] for s in range(1, 6)}
    assert [event["step"] for event in events(run, "resumed")] == [5, 9]
    recipes = [event["recipe"] for event in events(run, "attempt")]
    assert [(r["micro_batch_size"], r["grad_accum"], r["sharding"]) for r in recipes] == [
        (8, 1, "none"), (4, 1, "fsdp"), (8, 1, "none")
    ]  # fmt: skip
    assert events(run, "replanned")[0]["changed"]["resources.ranks_per_node"] == [1, 2]
    assert submitted == {name: (run.path / name).read_bytes() for name in submitted}, "kept as submitted"
    assert "local_ranks 2 " in (run.plan_from(1) / "scripts/start.sh").read_text()
    assert run.scripts == run.plan_from(2) / "scripts"


@pytest.mark.slow
def test_what_does_not_fit_is_refused_and_the_run_stays_as_it_was(lab: Lab) -> None:
    lab.script("raise ValueError('as it was asked to')")
    command = lab.job(command="python train.py", resources={"gpus_per_node": 0}, recipe="auto")
    assert lab.cli("run", str(command)).returncode == EXIT_CODES["user-error"]
    run = lab.newest()
    before = content(run)
    for change, reason in (
        ("resources.ranks_per_node=3", "8 samples cannot be shared equally by 3 ranks; nearest: 6 or 9"),
        ("resources.nodes=2", "2 nodes asked for, local gives 1"),
        ("recipe.micro_batch_size=3", "3 does not divide the 8 samples"),
        ("recipe.optimizer=adamw-9bit", "did you mean 'adamw-8bit'"),
    ):
        refused = lab.cli("resume", "--set", change)
        assert refused.returncode in (2, 4) and reason in refused.stderr, refused.stderr
        assert content(run) == before
    (lab.folder / "elsewhere.yaml").write_text(
        "name: elsewhere\nscheduler: local\npaths: {python: /no/python}\n"
    )
    refused = lab.cli("resume", "-c", "elsewhere.yaml", "--set", "resources.ranks_per_node=2")
    assert refused.returncode == 4 and "cannot start /no/python" in refused.stderr
    assert run.read_about().as_json() == json.loads(run.submitted.read_text()) and run.planned_at == 0
    assert lab.status(run)["state"] == "failed"


@pytest.mark.slow
def test_a_run_that_has_succeeded_is_trained_longer(lab: Lab) -> None:
    assert lab.cli("run", job(lab, 999, steps=2)).returncode == 0
    run = lab.newest()
    for change in ((), ("--set", "train.lr=0.1")):
        refused = lab.cli("resume", *change)
        assert refused.returncode == 4 and "`--set steps=N` trains it longer" in refused.stderr
    done = lab.cli("resume", "--set", "steps=3", "--follow")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(losses(run)) == [1, 2, 3] and lab.status(run)["state"] == "succeeded"
    assert [event["step"] for event in events(run, "resumed")] == [2]


@pytest.mark.slow
def test_a_larger_batch_and_another_schedule_are_the_users_to_ask_for_and_are_noted(lab: Lab) -> None:
    assert lab.cli("run", job(lab, 2)).returncode == EXIT_CODES["user-error"]
    run = lab.newest()
    more = ("-s", "batch.global=16", "-s", "steps=6", "-s", "args.after=999")
    done = lab.cli("resume", *more, "--follow")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "batch.global: 8 -> 16" in done.stdout and "note: batch.global: " in done.stdout
    assert "note: steps: the learning rate follows the new schedule" in done.stdout
    assert max(losses(run)) == 6


@pytest.mark.slow
def test_a_checkpoint_of_another_training_is_refused_before_anything_is_written(lab: Lab) -> None:
    assert lab.cli("run", job(lab, 2, steps=None, epochs=1)).returncode == EXIT_CODES["user-error"]
    run = lab.newest()
    before = content(run)
    for change, reason in (
        (
            "recipe.optimizer=lion",
            "those of adamw, recipe.optimizer is lion now; continue with `--set recipe.",
        ),
        ("batch.global=16", "its steps took 8 samples each, batch.global is 16 now"),
    ):
        refused = lab.cli("resume", "--set", change)
        assert refused.returncode == 4 and reason in refused.stderr, refused.stderr
        assert "step-00000002 cannot be resumed from: " in refused.stderr
        assert content(run) == before
    advised = ("-s", "batch.global=16", "-s", "epochs=null", "-s", "steps=4", "-s", "args.after=99")
    done = lab.cli("resume", *advised, "--follow")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.thorough
def test_8_bit_states_that_cannot_be_cut_again_say_so_and_the_way_back_is_open(lab: Lab) -> None:
    states = {"optimizer": "adamw-8bit", "sharding": "fsdp"}
    assert lab.cli("run", job(lab, 2, recipe=states, steps=4)).returncode == EXIT_CODES["user-error"]
    two = lab.cli("resume", "-s", "resources.ranks_per_node=2", "-s", "args.after=999", "--follow")
    assert two.returncode == EXIT_CODES["user-error"]
    assert "Resume in 1 shards" in verdicts(lab.newest())[-1]["exception"]
    one = lab.cli("resume", "-s", "resources.ranks_per_node=1", "--follow")
    assert one.returncode == 0, one.stdout + one.stderr

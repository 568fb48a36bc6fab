"""`optimizer_step: backward` computes the same as a step after the backward pass, and keeps no gradient."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from launcher.spec import variables
from launcher.spec.events import Probed, Resumed, StepLeftOut
from launcher.spec.verdict import EXIT_OOM
from launcher.train.step_in_backward import Norms
from tests.train.runs import any_error, error, job, losses, measure, prepare, recipe, start

FIELDS = {"train": {"clip_norm": None, "checkpoint_every": 2, "probe": "never"}}
SUPERVISED = {variables.SUPERVISED: "1"}
JOB, RECIPE = job(**FIELDS), recipe(optimizer_step="backward")


@pytest.mark.parametrize(
    ("cases", "ranks", "per_node"),
    [
        ("short", 2, 2),
        pytest.param("one", 1, 1, marks=pytest.mark.slow),
        pytest.param("two", 2, 2, marks=pytest.mark.slow),
        pytest.param("four", 4, 2, marks=pytest.mark.thorough),
    ],
)
def test_the_weights_are_the_same_bit_for_bit(tmp_path: Path, cases: str, ranks: int, per_node: int) -> None:
    measure("steps_in_backward.py", tmp_path, ranks=ranks, per_node=per_node, env={"CASES": cases})
    for rank in range(ranks):
        for name, found in json.loads((tmp_path / f"rank {rank}.json").read_text()).items():
            assert {one["digest"] for one in found.values()} == {found["after"]["digest"]}, name
            assert found["after"]["gradients"] >= 0 == found["backward"]["gradients"]
            for step, other in zip(found["after"]["steps"], found["backward"]["steps"], strict=True):
                # A plain step computes the norm in the type of the gradients: bf16 has 8 bits.
                rel = 1e-2 if "bf16" in name.split() else 1e-6
                assert step == pytest.approx(other, rel=rel), name


def test_the_norm_is_of_gradients_in_any_type() -> None:
    norms, types = Norms(ranks=1), (torch.bfloat16, torch.float32, torch.float64)
    for dtype in types:
        norms.add(torch.ones(2, dtype=dtype), torch.full((4,), 3.0, dtype=dtype))
    assert float(norms.squared) == 36.0 * len(types)


def straight(path: Path) -> dict[int, float]:
    run = prepare(path, JOB)
    ended = start(run, RECIPE)
    assert ended.codes == {0: 0, 1: 0}, ended.output
    return losses(run)


@pytest.mark.parametrize(
    ("phase", "resumed"),
    [("backward", (2, "checkpoint")), pytest.param("forward", (3, "shared-memory"), marks=pytest.mark.slow)],
)
def test_a_full_memory_restarts_from_the_last_complete_step(
    tmp_path: Path, phase: str, resumed: tuple[int, str]
) -> None:
    """In the forward pass of step 4 nothing has changed yet; in its backward pass some parameters have."""
    run = prepare(tmp_path / "run", JOB)
    ended = start(run, RECIPE, env={**SUPERVISED, "TRAIN_MEMORY_FAIL": f"step=4,phase={phase},rank=1"})
    assert EXIT_OOM in ended.codes.values(), ended.output
    why_not = "with optimizer_step: backward, parameters may have changed when memory runs out"
    assert error(run.attempt(0), 1)["why_not_in_process"] == why_not
    assert list(losses(run)) == [1, 2, 3]
    again = start(run, RECIPE, env=SUPERVISED)
    assert again.codes == {0: 0, 1: 0}, again.output
    events = [event for event in run.read_events() if isinstance(event, Resumed)]
    assert [(event.step, event.from_) for event in events] == [resumed]
    assert losses(run) == straight(tmp_path / "straight")


def test_a_gradient_that_is_not_finite_ends_the_run_and_is_in_no_checkpoint(tmp_path: Path) -> None:
    run = prepare(tmp_path / "run", job(**{**FIELDS, "task": "steps_in_backward:Steep"}))
    ended = start(run, recipe(micro=8, sharding="none", optimizer_step="backward"), ranks=1)
    assert list(ended.codes.values()) != [0], ended.output
    assert "the gradient of step 3 was not finite" in ended.output
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000002"]


@pytest.mark.parametrize("probe", ["never", pytest.param("always", marks=pytest.mark.slow)])
def test_a_block_that_is_used_twice_is_refused_under_fsdp(tmp_path: Path, probe: str) -> None:
    """FSDP gives it two gradients; on one device autograd adds them first."""
    fields = {"task": "steps_in_backward:Twice", "train": {**FIELDS["train"], "probe": probe}}
    run = prepare(tmp_path / "run", job(**fields))
    ended = start(run, RECIPE)
    assert ended.codes != {0: 0, 1: 0}
    assert "layers.0.weight gets its gradient in parts" in ended.output
    assert not losses(run) and not list(run.checkpoints.glob("*"))
    assert any_error(run.attempt(0))["failure"] == "user-error"
    alone = {}
    for when in ("after", "backward"):
        single = prepare(tmp_path / when, job(**fields))
        ended = start(single, recipe("none", micro=8, optimizer_step=when), ranks=1)
        assert ended.codes == {0: 0}, ended.output
        alone[when] = losses(single)
    assert alone["after"] == alone["backward"]


def test_a_weight_that_a_recomputation_reads_after_its_update_is_refused(tmp_path: Path) -> None:
    run = prepare(tmp_path / "run", job(**{**FIELDS, "task": "steps_in_backward:Peeking"}))
    chosen = recipe("none", micro=8, optimizer_step="backward", activations="checkpoint")
    ended = start(run, chosen, ranks=1)
    assert ended.codes != {0: 0}
    assert "head.weight is updated before the backward pass reads it for the last time" in ended.output
    assert error(run.attempt(0), 0)["failure"] == "user-error" and not losses(run)


def test_a_loss_that_is_not_finite_is_left_out_before_anything_changes(tmp_path: Path) -> None:
    run = prepare(tmp_path / "run", job(**{**FIELDS, "task": "steps_in_backward:Infinite"}))
    ended = start(run, RECIPE)
    assert ended.codes == {0: 0, 1: 0}, ended.output
    assert [one.step for one in run.read_events() if isinstance(one, StepLeftOut)] == [3]
    assert all(math.isfinite(loss) for step, loss in losses(run).items() if step != 3)


@pytest.mark.slow
def test_the_probe_covers_the_updates_and_changes_nothing(tmp_path: Path) -> None:
    run = prepare(tmp_path / "run", job(**{**FIELDS, "train": {**FIELDS["train"], "probe": "always"}}))
    ended = start(run, RECIPE)
    assert ended.codes == {0: 0, 1: 0}, ended.output
    # A longer batch comes later, and is probed as well.
    assert {one.micro_batch_size for one in run.read_events() if isinstance(one, Probed)} == {4}
    assert losses(run) == straight(tmp_path / "straight")
    drilled = prepare(
        tmp_path / "drilled", job(**{**FIELDS, "train": {**FIELDS["train"], "probe": "always"}})
    )
    ended = start(drilled, RECIPE, env={"TRAIN_MEMORY_FAIL": "phase=probe"})
    assert EXIT_OOM in ended.codes.values(), ended.output

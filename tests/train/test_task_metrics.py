"""A task's own metrics, and the checkpoint that is kept for its held-out loss."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from launcher.rundir.files import replace_json
from launcher.rundir.find import remove_partial_checkpoints
from launcher.rundir.layout import RunDir
from launcher.spec.events import Downgrade, StateNotSaved
from launcher.spec.job import Job
from launcher.train.checkpoints.folder import MARKER, complete_checkpoints, read_marker
from launcher.train.checkpoints.retention import best, remove_all_but
from launcher.train.task import TaskError, check_metrics
from launcher.train.task_metrics import RESERVED, log, open_logged
from tests.train.runs import job, prepare, recipe, start
from tests.train.test_traps import any_error
from tests.train.traps import Counted

TRAIN = {"eval_every": 1, "checkpoint_every": 1, "keep_best": True, "keep_checkpoints": 1}


def trained(folder: Path, ranks: int, micro: int, env: dict[str, str] | None = None) -> RunDir:
    run = prepare(folder, job(task="traps:Counted", steps=3, train=TRAIN))
    accumulation = 8 // micro // ranks
    ended = start(run, recipe("ddp" if ranks > 1 else "none", micro, accumulation), ranks=ranks, env=env)
    assert set(ended.codes.values()) == {0}, ended.output
    return run


def own(run: RunDir) -> list[dict[str, Any]]:
    names = ("accuracy", "place", "eval_accuracy", "eval_place")
    assert all("never" not in line and "eval_never" not in line for line in run.read_metrics())
    return [{name: line[name] for name in names} for line in run.read_metrics()]


@pytest.mark.slow
def test_metrics_are_those_of_the_whole_batch_however_it_is_split(tmp_path: Path) -> None:
    """On one rank, on two, in smaller micro-batches, and in a step that is repeated when memory runs out."""
    whole = own(trained(tmp_path / "whole", 1, 8))
    assert len(whole) == 3 and all(0 <= line["eval_accuracy"] <= 1 for line in whole)
    drill = {"TRAIN_MEMORY_FAIL": "step=2,phase=backward", "TRAIN_MEMORY_BUDGET": "1GiB"}
    for name, split in {
        "two ranks": trained(tmp_path / "ranks", 2, 2),
        "repeated": trained(tmp_path / "repeated", 1, 4, drill),
    }.items():
        for one, other in zip(own(split), whole, strict=True):
            assert one["accuracy"] == pytest.approx(other["accuracy"], abs=0.04), name  # a tie may turn
            assert one["eval_accuracy"] == pytest.approx(other["eval_accuracy"], abs=0.04), name
            assert one["place"] == pytest.approx(other["place"], rel=1e-5), name
    changed = [e for e in RunDir(tmp_path / "repeated").read_events() if isinstance(e, Downgrade)]
    assert changed and changed[0].step == 2


@pytest.mark.parametrize(
    ("ranks", "fields"),
    [(1, {"activations": "checkpoint", "accumulation": 2}), (2, {"pipeline": 2, "accumulation": 2})],
)
def test_what_a_block_logs_counts_once_and_on_every_stage(
    tmp_path: Path, ranks: int, fields: dict[str, Any]
) -> None:
    run = prepare(tmp_path, job(task="traps:CountsBlocks", steps=2, train={"eval_every": 1}))
    ended = start(run, recipe("none", **fields), ranks=ranks)
    assert set(ended.codes.values()) == {0}, ended.output
    assert [(line["blocks"], line["eval_blocks"]) for line in run.read_metrics()] == [(3, 3)] * 2


def test_a_task_knows_its_step_in_a_repeated_one_in_an_evaluation_and_after_a_restart(tmp_path: Path) -> None:
    """`loss` is called more often when memory runs out, so a schedule cannot count its calls."""
    run = prepare(tmp_path / "run", job(task="traps:Scheduled", steps=5, train=TRAIN))
    drill = {"TRAIN_MEMORY_FAIL": "step=2,phase=backward,attempt=0;step=4,phase=optimizer,attempt=0"}
    assert start(run, recipe("none", micro=8), ranks=1, env=drill).codes != {0: 0}
    assert start(run, recipe("none", micro=4, accumulation=2), ranks=1, env=drill).codes == {0: 0}
    called_for = {line["step"]: (line["called_for"], line["eval_called_for"]) for line in run.read_metrics()}
    assert called_for == {step: (step, step) for step in range(1, 6)}
    events = run.read_events()
    assert {"downgrade", "resumed"} <= {event.kind for event in events}
    assert [event.names for event in events if isinstance(event, StateNotSaved)] == [["task.calls"]]


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32, torch.int8])
def test_a_sum_over_many_micro_batches_is_exact_whatever_the_type_of_its_parts(kind: torch.dtype) -> None:
    metrics = open_logged(["a", "b"])
    log("a", 2.0**24, 2**24)
    for _ in range(1000):
        log("a", torch.tensor([3], dtype=kind), torch.ones((), dtype=kind))
    assert metrics.values()[:2] == [2**24 + 3000, 2**24 + 1000]
    assert metrics.means(metrics.values()) == {"a": (2**24 + 3000) / (2**24 + 1000)}


def test_numbers_of_numpy_can_be_logged() -> None:
    metrics = open_logged(Counted.metrics)
    task = Counted()
    task.log("accuracy", np.float32(0.5), np.int64(2))
    assert metrics.means(metrics.values()) == {"accuracy": 0.25}
    with pytest.raises(TaskError, match="accuracy: must be a number"):
        task.log("accuracy", "0.5")  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_rank_without_samples_left_adds_nothing_to_the_metrics_of_an_evaluation(tmp_path: Path) -> None:
    """Of 64 samples in groups of 2 x 6, the last group has 4: the second rank repeats a sample."""
    assert len(Counted().data("eval")) % 12 == 4
    fields = {"task": "traps:Counted", "steps": 1, "batch": {"global": 12}, "train": {"eval_every": 1}}
    found = []
    for ranks in (1, 2):
        run = prepare(tmp_path / str(ranks), job(**fields))
        ended = start(run, recipe("ddp" if ranks > 1 else "none", 12 // ranks), ranks=ranks)
        assert set(ended.codes.values()) == {0}, ended.output
        found.append(own(run)[0]["eval_accuracy"])
    assert found[0] == pytest.approx(found[1], rel=1e-9)


@pytest.mark.slow
def test_the_marker_of_a_checkpoint_tells_its_held_out_loss_and_the_best_stays(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", 1, 8)
    losses = {line["step"]: line["eval_loss"] for line in run.read_metrics()}
    complete = complete_checkpoints(run.checkpoints)
    assert set(complete) == {3, min(losses, key=losses.__getitem__)}
    assert all(
        read_marker(path)["eval_loss"] == pytest.approx(losses[step]) for step, path in complete.items()
    )


def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    for step, loss in ((1, 3.0), (2, 1.0), (3, 1.0), (4, None), (5, 2.0)):
        path = tmp_path / f"step-{step:08d}"
        path.mkdir()
        replace_json(path / MARKER, {"step": step, **({} if loss is None else {"eval_loss": loss})})
    remove_all_but(tmp_path, 2)
    assert list(complete_checkpoints(tmp_path)) == [2, 4, 5]
    assert best(complete_checkpoints(tmp_path)) == 2
    assert best({}) is None


def test_a_checkpoint_that_is_being_removed_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(tmp_path)
    for step in (1, 2):
        (run.checkpoints / f"step-{step:08d}").mkdir(parents=True)
        replace_json(run.checkpoints / f"step-{step:08d}" / MARKER, {"step": step})
    with monkeypatch.context() as killed:
        killed.setattr(shutil, "rmtree", lambda *_, **__: None)
        remove_all_but(run.checkpoints, 1)
    assert list(complete_checkpoints(run.checkpoints)) == [2]
    remove_partial_checkpoints(run)
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000002"]


@pytest.mark.parametrize("train", [{}, {"eval_every": 3}, {"eval_every": 2, "checkpoint_every": None}])
def test_the_best_needs_an_evaluation_of_each_checkpoint(train: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="eval_every"):
        Job.model_validate(
            {
                "name": "j",
                "task": "a:B",
                "batch": {"global": 1},
                "steps": 1,
                "train": {"keep_best": True, **train},
            }
        )


@pytest.mark.slow
def test_a_name_that_is_not_declared_is_refused(tmp_path: Path) -> None:
    run = prepare(tmp_path / "run", job(task="traps:Undeclared", steps=1))
    assert start(run, recipe("none", 8), ranks=1).codes == {0: 1}
    failure = any_error(run.attempt(0))
    assert failure["failure"] == "user-error" and "'accuracy' is not in" in failure["exception"]


def test_a_metric_under_a_name_of_launchers_own_is_refused(tmp_path: Path) -> None:
    class Named(Counted):
        metrics = ("accuracy", "loss", "memory_used")

    check_metrics(Counted())
    with pytest.raises(TaskError, match="metrics of Named: launcher records loss, memory_used itself"):
        check_metrics(Named())
    run = prepare(tmp_path, job(task="traps:Counted", steps=1))
    assert start(run, recipe("none", 8), ranks=1).codes == {0: 0}
    [line] = run.read_metrics()
    others = {name for name in line if not name.startswith("memory_")} - {"accuracy", "place"}
    assert others <= RESERVED, "all names are known"

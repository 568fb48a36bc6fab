"""Pipeline parallelism: a model in stages trains like the whole one, restarts and resumes like it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from launcher.rundir.layout import RunDir
from launcher.rundir.shared import remove_handover
from launcher.spec.job import Job
from launcher.spec.recipe import Recipe
from launcher.spec.verdict import EXIT_OOM
from tests.train.runs import job, losses, prepare, recipe, start

GPT = {"layers": 3, "dim": 16, "heads": 2, "context": 16}
SUPERVISED = {"LAUNCHER_SUPERVISED": "1"}
STEPS = 5
ORDER = 1e-6
"Relative difference of sums in another order, in fp32."


def gpt(**fields: Any) -> Job:
    train = {"lr": 1e-2, "checkpoint_every": None, **fields.pop("train", {})}
    args = {**GPT, **fields.pop("args", {})}
    return job(task="launcher.tasks.gpt:PydocGPT", args=args, steps=STEPS, train=train, **fields)


def staged(sharding: str = "none", accumulation: int = 4, **fields: Any) -> Recipe:
    return recipe(sharding, micro=2, accumulation=accumulation, pipeline=2, **fields)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Two stages, dropout, a checkpoint after the third step and after the last one."""
    train = {"checkpoint_every": 3, "keep_checkpoints": 3}
    run = prepare(tmp_path_factory.mktemp("pipeline") / "run", gpt(args={"dropout": 0.2}, train=train))
    ended = start(run, staged(), env=SUPERVISED)
    assert ended.codes == {0: 0, 1: 0}, ended.output
    return run


@pytest.mark.parametrize(
    ("phase", "rank"), [("forward", 1), ("backward", 0), ("optimizer", 1), ("data", 0), ("backward", 1)]
)
def test_a_stage_out_of_memory_ends_all_at_once_and_no_step_is_lost(
    undisturbed: RunDir, tmp_path: Path, phase: str, rank: int
) -> None:
    run = prepare(tmp_path / "run", gpt(args={"dropout": 0.2}))
    ended = start(run, staged(), env={**SUPERVISED, "TRAIN_MEMORY_FAIL": f"rank={rank},step=3,phase={phase}"})
    assert ended.codes[rank] == EXIT_OOM, ended.output
    again = start(run, staged(), env=SUPERVISED)
    remove_handover(run, 0)
    assert again.codes == {0: 0, 1: 0}, again.output
    assert [(one["step"], one["from"]) for one in run.read_events() if one["event"] == "resumed"] == [
        (2, "shared-memory")
    ]
    assert losses(run) == losses(undisturbed)


def test_a_resumed_run_equals_an_undisturbed_one_bit_for_bit(undisturbed: RunDir, tmp_path: Path) -> None:
    run = without(undisturbed, tmp_path, 5)
    ended = start(run, staged())
    assert ended.codes == {0: 0, 1: 0}, ended.output
    assert losses(run, attempt=1) == {step: losses(undisturbed)[step] for step in (4, 5)}
    mine, theirs = (tensors(one, tmp_path / f"{one.path.parent.name}.pt") for one in (run, undisturbed))
    assert mine.keys() == theirs.keys() and len(mine) > 60
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


@pytest.mark.parametrize(
    ("then", "ranks"),
    [
        (recipe("none", micro=8), 1),
        (recipe("fsdp", micro=4), 2),
        (staged("fsdp", accumulation=2), 4),
        (staged(schedule="gpipe", stages=(1, 2)), 2),
    ],
    ids=["one rank", "fsdp 2", "pipeline 2 x fsdp 2", "another cut"],
)
def test_a_checkpoint_is_read_on_another_mesh(
    tmp_path: Path, whole: RunDir, then: Recipe, ranks: int
) -> None:
    run = without(whole, tmp_path, 5)
    ended = start(run, then, ranks=ranks)
    assert set(ended.codes.values()) == {0}, ended.output
    expected = {step: losses(whole)[step] for step in (4, 5)}
    assert losses(run, attempt=1) == pytest.approx(expected, rel=ORDER)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    train = {"checkpoint_every": 3, "keep_checkpoints": 3}
    run = prepare(tmp_path_factory.mktemp("whole") / "run", gpt(train=train))
    assert start(run, staged()).codes == {0: 0, 1: 0}
    return run


def without(run: RunDir, folder: Path, step: int) -> RunDir:
    """Return a copy of the run as it was before this checkpoint."""
    copy = RunDir(shutil.copytree(run.path, folder / "copy"))
    shutil.rmtree(copy.checkpoints / f"step-{step:08d}")
    return copy


def tensors(run: RunDir, into: Path) -> dict[str, torch.Tensor]:
    dcp_to_torch_save(run.checkpoints / "step-00000005", into)
    content = torch.load(into, weights_only=False)
    states = content["optimizer"]["state"].items()
    return content["model"] | {f"{name} {key}": v for name, one in states for key, v in one.items()}

"""A rank of a tensor-parallel group or of a pipeline ends or halts: no other one waits for it for ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.rundir.layout import RunDir
from tests.train.runs import Ended, error, job, measure, prepare, recipe, start

MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor": (2, {"tensor": 2}),
    "compiled": (2, {"tensor": 2, "compile": True}),
    "pipeline": (2, {"pipeline": 2}),
    "interleaved": (2, {"pipeline": 2, "virtual_stages": 2}),
    "zero-bubble": (2, {"pipeline": 2, "schedule": "zero-bubble"}),
    "copies of groups": (4, {"tensor": 2, "sharding": "zero1"}),
}


def after(fault: str, mesh: str, folder: Path, timeout: float) -> tuple[Ended, RunDir]:
    """Run the ranks until the second one has the fault in its third loss."""
    ranks, chosen = MESHES[mesh]
    train = {"checkpoint_every": None, "collective_timeout": timeout}
    args = {"layers": 4, "fault": fault, "call": 3}
    run = prepare(folder / "run", job(task="in_parts:InParts", args=args, train=train))
    fields = {"sharding": "none", "micro": 4 // ranks, "accumulation": 4, **chosen}
    ended = start(run, recipe(**fields), ranks)
    assert 0 not in ended.codes.values(), ended.output
    return ended, run


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_an_exception_or_a_signal_ends_both(mesh: str, tmp_path: Path) -> None:
    _, run = after("raise", mesh, tmp_path / "raise", timeout=600)
    told = error(run.attempt(0), 1)
    assert told["failure"] == "user-error" and "no such label" in told["exception"]
    assert (told["phase"], told["step"]) == ("forward", 1)
    ended, _ = after("kill", mesh, tmp_path / "kill", timeout=600)
    assert ended.codes[1] == 137


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", MESHES)
def test_a_halted_rank_is_a_timeout_of_another_one(mesh: str, tmp_path: Path) -> None:
    _, run = after("halt", mesh, tmp_path, timeout=5)
    told = [error(run.attempt(0), number).get("failure") for number in range(MESHES[mesh][0])]
    assert "nccl-timeout" in told and not {*told} - {"nccl-timeout", None}


def test_no_group_of_a_mesh_waits_longer_or_less_long_than_the_job_says(tmp_path: Path) -> None:
    found = measure("group_timeouts.py", tmp_path, ranks=4, per_node=2)
    assert len(found) > 4 and set(found.values()) == {job().train.collective_timeout}, found

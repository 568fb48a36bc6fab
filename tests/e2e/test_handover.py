"""Out of memory, the same allocation, the next attempt: no optimizer step is lost, nobody hangs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from launcher.runs.layout import RunDir
from launcher.runs.shared import handover_folder
from launcher.supervise.process import processes_of
from tests.lab import Lab, events, metrics, verdicts

pytestmark = pytest.mark.e2e

STEPS = 8
# The model's batches halve from attempt to attempt: no rung is left after the fifth.
BATCH = 32


def job(lab: Lab, *faults: list[Any], train: dict[str, Any] | None = None, **fields: Any) -> str:
    shutil.copy(Path(__file__).with_name("faults.py"), lab.folder / "faults.py")
    base = {
        "task": "faults:Faulty",
        "args": {"faults": list(faults)},
        "steps": STEPS,
        "batch": {"global": BATCH},
        "train": {"checkpoint_every": None, "lr": 1e-2, **(train or {})},
        "recipe": {"sharding": "ddp", "precision": "fp32", "micro_batch_size": 16},
    }
    return str(lab.job(**{**base, **fields}))


def run(lab: Lab, *faults: list[Any], code: int = 0, **fields: Any) -> RunDir:
    done = lab.cli("run", job(lab, *faults, **fields))
    found = lab.newest()
    assert done.returncode == code, done.stdout + done.stderr + lab.all_logs(found)
    assert not handover_folder(found, 0).parent.exists(), "nothing stays in shared memory"
    assert not processes_of(found.path)
    return found


def resumed(run: RunDir) -> list[tuple[int, str]]:
    return [(event["step"], event["from"]) for event in events(run, "resumed")]


def final(run: RunDir, into: Path) -> dict[str, torch.Tensor]:
    """All that the last checkpoint holds, each rank's own state included."""
    path = run.checkpoints / f"step-{STEPS:08d}"
    dcp_to_torch_save(path, into)
    whole = {"whole": torch.load(into, weights_only=False)}
    for rank in (0, 1):
        own = torch.load(path / f"rank-{rank:03d}.pt")
        whole[f"rank {rank}"] = [own["rng"]["torch"], own["buffers"]]
    return dict(_flat(whole))


def _flat(tree: Any, name: str = "") -> list[tuple[str, torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        return [(name, tree)]
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [pair for key, value in pairs for pair in _flat(value, f"{name}/{key}")]


def test_every_phase_that_ends_an_attempt_costs_no_optimizer_step(lab: Lab) -> None:
    ours = run(
        lab,
        [0, 1, "backward", 5],
        [1, 0, "evaluation", 6],
        [2, -1, "forward", 7],
        [3, 1, "checkpoint", 8],
        train={"eval_every": 2},
    )
    assert [(one["failure"], one["phase"], one["step"]) for one in verdicts(ours)] == [
        ("gpu-oom", "backward", 5),
        ("gpu-oom", "evaluation", 6),
        ("gpu-oom", "forward", 7),
        ("gpu-oom", "checkpoint", 8),
        ("succeeded", None, None),
    ], lab.all_logs(ours)
    assert resumed(ours) == [(step, "shared-memory") for step in (4, 6, 6, 8)]
    assert [event["step"] for event in events(ours, "handover")] == [4, 6, 6, 8]
    assert [line["step"] for line in metrics(ours)] == list(range(1, STEPS + 1)), "each step once"
    assert [line["step"] for line in metrics(ours) if "eval_loss" in line] == [2, 4, 6, 8]

    # The same micro-batches in the same steps, but from checkpoints.
    theirs = run(
        lab,
        [0, 0, "forward", 5],
        [1, 0, "forward", 7],
        [2, 0, "forward", 7],
        train={"eval_every": 2, "checkpoint_every": 2},
    )
    assert resumed(theirs) == [(step, "checkpoint") for step in (4, 6, 6)]
    mine, other = (final(one, lab.folder / f"{one.id}.pt") for one in (ours, theirs))
    assert len(mine) > 20 and mine.keys() == other.keys()
    assert [name for name in mine if not torch.equal(mine[name], other[name])] == []

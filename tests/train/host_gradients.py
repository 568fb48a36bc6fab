"""Run on every rank by test_host_gradients.py: the same training with gradients on the device and on the
host."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from launcher.rundir.layout import RunDir
from launcher.train.cpu_memory_budget import MemoryBudget
from launcher.train.local_shards import local
from launcher.train.loop import Trainer
from launcher.train.optimizers.offload import gradient_of
from launcher.train.phase import Where
from launcher.train.rank import Rank, join_ranks, this_place, this_rank
from optimizers import BATCH, digest
from ragged import Ragged
from runs import job, recipe

STEPS = 3
CLIP = 0.05
"Less than the norm of every step."
BIG = 2**62


class Twice(Ragged):
    """A block that the model uses twice."""

    def model(self) -> nn.Module:
        model = super().model()
        model.layers.append(model.layers[0])
        return model


TASKS: dict[str, dict[str, Any]] = {
    "gpt": {"task": "launcher.tasks.gpt:PydocGPT", "args": {"layers": 2, "dim": 72, "context": 16}},
    "twice": {"task": "host_gradients:Twice"},
}


def made(
    rank: Rank, offload: str, task: str, fields: dict[str, str], run: RunDir, budget: MemoryBudget
) -> Trainer:
    chosen = recipe(**{"accumulation": 2, **fields}, micro=BATCH // rank.world // 2, offload=offload)
    asked = job(
        **TASKS[task],
        batch={"global": BATCH},
        steps=2 * STEPS,
        train={"lr": 1e-3, "clip_norm": CLIP, "nvme_dir": str(run.path.parent)},
    )
    there = Rank(**{**vars(rank), "recipe": chosen, "job": asked, "run": run})
    return Trainer(there, Where(), budget)


def results(one: Trainer, first: int, last: int) -> list[list[float]]:
    found = [one.train_step(step) for step in range(first, last + 1)]
    return [[step.loss, step.weight, step.grad_norm, step.lr] for step in found]


def between(one: Trainer) -> list[int]:
    """Bytes of gradients on the device, on the host, and of all trained parameters, after the passes of a
    step."""
    sums = one._gradients(1)
    assert sums is not None
    trained = [p for p in one.model.parameters() if p.requires_grad]
    on_device = sum(local(p.grad).nbytes for p in trained if p.grad is not None)
    summed = [g for p in trained if (g := gradient_of(p, one.optimizer)) is not None]
    one.optimizer.zero_grad()
    assert all(gradient_of(p, one.optimizer) is None for p in trained)
    return [on_device, sum(local(g).nbytes for g in summed), sum(local(p).nbytes for p in trained)]


def compared(rank: Rank, folder: Path, offload: str, task: str, fields: dict[str, str]) -> dict[str, Any]:
    """What each kind computes; the second half also after a checkpoint of the other kind."""
    found: dict[str, Any] = {}
    places = ("none", offload)
    name = f"{offload} {task} {' '.join(fields.values())}"
    runs = {place: RunDir(folder / f"{name} from {place}") for place in places}
    for place, run in runs.items():
        run.path.mkdir(exist_ok=True)
        with MemoryBudget(BIG) as budget:
            one = made(rank, place, task, fields, run, budget)
            steps = results(one, 1, STEPS)
            saved = one.checkpoints.save(STEPS)
            assert saved is not None and saved.problem is None, saved
            budget.take_peak()
            steps += results(one, STEPS + 1, 2 * STEPS)
            peak, bits = budget.take_peak(), digest(one)
            found[place] = {"steps": steps, "digest": bits, "peak": peak, "gradients": between(one)}
    for place, other in zip(places, reversed(places), strict=True):
        with MemoryBudget(BIG) as budget:
            one = made(rank, place, task, fields, runs[other], budget)
            assert one.checkpoints.restore() == STEPS
            found[f"{place} resumed"] = {"steps": results(one, STEPS + 1, 2 * STEPS), "digest": digest(one)}
    return found


Case = tuple[str, str, dict[str, str]]
CASES: dict[str, list[Case]] = {
    "one": [
        ("cpu-optimizer", "gpt", {"sharding": "none"}),
        ("cpu-optimizer", "twice", {"sharding": "none"}),
        ("nvme-optimizer", "gpt", {"sharding": "none", "precision": "bf16", "activations": "checkpoint"}),
    ],
    "short": [
        ("cpu-optimizer", "gpt", {"sharding": "fsdp"}),
        ("cpu-optimizer", "twice", {"sharding": "fsdp"}),
    ],
    "two": [
        ("cpu-optimizer", "gpt", {"sharding": "fsdp", "grad_sync": "last", "precision": "bf16-mixed"}),
        ("nvme-optimizer", "gpt", {"sharding": "fsdp-keep", "precision": "bf16", "optimizer": "lion"}),
        ("cpu-optimizer", "gpt", {"sharding": "fsdp", "optimizer": "adamw-8bit", "activations": "compress"}),
        ("cpu-optimizer", "gpt", {"sharding": "zero1"}),
    ],
    "four": [("cpu-optimizer", "gpt", {"sharding": "hybrid"})],
}


def main(out: Path) -> None:
    rank = this_rank(this_place())
    join_ranks(rank)
    found = {
        f"{offload} {task} {' '.join(fields.values())}": compared(rank, out.parent, offload, task, fields)
        for offload, task, fields in CASES[os.environ["CASES"]]
    }
    out.with_name(f"rank {rank.number}.json").write_text(json.dumps(found))
    if rank.first:
        out.write_text("{}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))

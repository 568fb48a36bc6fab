"""Run on every rank by test_pipeline.py: a few steps of each built-in model, in stages and in one process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from launcher.rundir.files import replace_json
from launcher.rundir.layout import RunDir
from launcher.train.budget import Unlimited
from launcher.train.failure import leave
from launcher.train.loop import Trainer
from launcher.train.rank import Rank, join_ranks, this_place, this_rank
from launcher.train.where import Where
from runs import HERE, job, recipe

STEPS = 5
HELD_OUT = 5
"Samples that are evaluated: the last micro-batch is not full."
TASKS: dict[str, dict[str, Any]] = {
    "gpt": {
        "task": "launcher.tasks.gpt:PydocGPT",
        "args": {"layers": 3, "dim": 32, "heads": 2, "context": 16},
    },
    "llama": {
        "task": "launcher.tasks.llama:LanguageModel",
        "args": {"context": 16, "model": {"layers": 5}},
    },
    "video": {"task": "launcher.tasks.video:VideoLanguageModel", "args": {"max_frames": 2, "context": 16}},
    "brain": {"task": "launcher.tasks.brain:BrainAutoencoder", "model": {"batch_norm": True}},
}
STAGED: dict[str, dict[str, Any]] = {
    "1f1b": {"sharding": "none"},
    "gpipe": {"sharding": "none", "schedule": "gpipe"},
    "fsdp": {"sharding": "fsdp", "grad_sync": "last"},
}


def trainer(rank: Rank, folder: Path, task: str, asked: dict[str, Any], **train: Any) -> Trainer:
    made = recipe(
        **{
            "sharding": "none",
            "micro": 2,
            "accumulation": 4 // max(1, rank.world // asked.get("pipeline", 1)),
            **asked,
        }
    )
    wanted = job(
        **TASKS[task],
        batch={"global": 8},
        steps=STEPS,
        train={"lr": 1e-3, "clip_norm": 0.5, "eval_every": STEPS, **train},
    )
    run = RunDir(folder / task)
    run.path.mkdir(exist_ok=True)
    return Trainer(
        Rank(**{**vars(rank), "recipe": made, "job": wanted, "run": run, "workdir": str(HERE)}),
        Where(),
        Unlimited(),
    )


def steps_of(made: Trainer) -> dict[str, Any]:
    """Losses, norms and evaluation; and on rank 0 all parameters after the last step."""
    results = [made.train_step(step) for step in range(1, STEPS + 1)]
    assert made.held_out is not None
    made.held_out.samples = HELD_OUT
    evaluated = made.evaluate()
    own = {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in made.model.named_parameters()
    }
    everyones: list[Any] = [own] * made.rank.world
    if made.rank.world > 1:
        dist.all_gather_object(everyones, own)
    return {
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results],
        "weights": [result.weight for result in results],
        "evaluated": evaluated,
        "parameters": {name: value for one in everyones for name, value in one.items()},
        "own": [sum(value.numel() for value in one.values()) for one in everyones],
    }


def main(out: Path) -> None:
    rank = this_rank(this_place())
    join_ranks(rank)
    found: dict[str, Any] = {}
    for task in TASKS:
        cases = (
            {name: {"pipeline": 2, **asked} for name, asked in STAGED.items()}
            if rank.world > 1
            else {"one": {}}
        )
        for name, asked in cases.items():
            found[f"{task} {name}"] = steps_of(trainer(rank, out.parent, task, asked))
    if rank.first:
        torch.save(found, out.with_suffix(".pt"))
        replace_json(
            out, {name: {k: v for k, v in one.items() if k != "parameters"} for name, one in found.items()}
        )
    leave(0)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    main(Path(sys.argv[1]))

"""Run on ranks by test_tensor.py: built-in models, trained alone and on meshes with tensor parallelism."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from launcher.spec.job import Job
from launcher.train.budget import Unlimited
from launcher.train.failure import leave
from launcher.train.loop import Trainer
from launcher.train.rank import Rank, join_ranks, this_place, this_rank
from launcher.train.where import Where
from runs import HERE, recipe

STEPS, BATCH = 5, 8
JOBS: dict[str, dict[str, Any]] = {
    "llama": {"task": "launcher.tasks.llama:LanguageModel", "args": {"context": 31}},
    "tied": {
        "task": "launcher.tasks.llama:LanguageModel",
        "args": {"context": 16, "model": {"tied": True, "vocabulary": 257}},
    },
    "gpt": {
        "task": "launcher.tasks.gpt:PydocGPT",
        "args": {"layers": 2, "dim": 32, "heads": 2, "context": 32},
    },
    "video": {"task": "launcher.tasks.video:VideoLanguageModel", "args": {"max_frames": 5}},
    "brain": {
        "task": "launcher.tasks.brain:BrainAutoencoder",
        "model": {"batch_norm": True},
    },
    "parts": {
        "task": "launcher.tasks.brain:BrainAutoencoder",
        "args": {"parts": 4},
        "model": {"batch_norm": True},
    },
}


def job(name: str, **train: Any) -> Job:
    settings = {"lr": 1e-3, "warmup_steps": 2, "clip_norm": 0.5, "checkpoint_every": None, **train}
    fields = {"name": "tensor", "batch": {"global": BATCH}, "steps": STEPS, "train": settings}
    return Job.model_validate({**fields, **JOBS[name]})


def trained(rank: Rank, name: str, **fields: Any) -> dict[str, Any]:
    """The loss and norm of each step, and the whole parameters at the start and at the end."""
    train = fields.pop("train", {})
    chosen, data = recipe(**fields), rank.world // fields.get("tensor", 1)
    micro = BATCH // data // chosen.grad_accum
    asked = chosen.model_copy(update={"micro_batch_size": micro})
    trainer = Trainer(
        Rank(**{**vars(rank), "recipe": asked, "job": job(name, **train)}), Where(), Unlimited()
    )
    first = whole(trainer)
    steps = [trainer.train_step(step) for step in range(1, STEPS + 1)]
    found = {
        "losses": [step.loss for step in steps],
        "norms": [step.grad_norm for step in steps],
        "weights": [step.weight for step in steps],
        "first": first,
        "last": whole(trainer),
    }
    del trainer
    gc.collect()
    return found


@torch.no_grad()
def whole(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for name, value in trainer.model.state_dict().items()
    }


def main(out: Path) -> None:
    rank = this_rank(this_place())
    join_ranks(rank)
    results = {}
    for label, (name, fields) in json.loads(os.environ["CASES"]).items():
        found = trained(rank, name, **fields)
        if rank.first:
            torch.save(found, out.parent / f"{label}.pt")
        results[label] = found["losses"]
    if rank.first:
        out.write_text(json.dumps(results))
    leave(0)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    main(Path(sys.argv[1]))

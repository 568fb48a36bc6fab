"""Run on every rank by test_scaler.py: fp16 against fp32, and an overflow that one rank alone has."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from gradients import Capture, captured, distance
from launcher.train.cpu_memory_budget import Unlimited
from launcher.train.loop import Trainer
from launcher.train.phase import Where
from launcher.train.rank import Rank, join_ranks, this_place, this_rank
from launcher.train.scaler import START
from runs import job, recipe

TOO_MUCH = 2.0**40


def weights(trainer: Trainer) -> torch.Tensor:
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in trainer.model.parameters()]
    return torch.cat([p.detach().flatten() for p in whole]).clone()


def compared(rank: Rank, sharding: str) -> dict[str, Any]:
    half = {"precision": "fp16-mixed", "grad_scaler": True}
    _, exact = captured(rank, sharding, 2, None, "fp32")
    asked = job(batch={"global": 8 * rank.world})
    chosen = recipe(sharding, 2, 4, **half)
    trainer = Trainer(Rank(**{**vars(rank), "recipe": chosen, "job": asked}), Where(), Unlimited())

    before = weights(trainer)
    trainer.scaler.factor = START if rank.first else TOO_MUCH
    norm = trainer.train_step(1).grad_norm
    unchanged = torch.equal(weights(trainer), before)
    factors: list[Any] = [None] * rank.world
    dist.all_gather_object(factors, (trainer.scaler.factor, unchanged, math.isfinite(norm)))

    trainer.scaler.factor = START
    adamw, trainer.optimizer = trainer.optimizer, Capture(trainer.model.parameters())
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.0
    trainer.train_step(1)
    gradient = trainer.optimizer.gradient
    trainer.optimizer = adamw
    trainer.train_step(1)
    return {
        "after overflow": factors,
        "distance": distance(gradient, exact),
        "moves again": not torch.equal(weights(trainer), before),
    }


def main(out: Path) -> None:
    rank = this_rank(this_place())
    join_ranks(rank)
    result = {sharding: compared(rank, sharding) for sharding in ("ddp", "fsdp", "fsdp-keep")}
    if rank.first:
        out.write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

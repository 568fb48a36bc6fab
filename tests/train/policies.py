"""Run on every rank by test_policies.py: gradient and peak memory of one step under each policy."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

import launcher.train.model as model
from gradients import Capture, distance
from launcher.train.cpu_memory_budget import MemoryBudget
from launcher.train.float8 import to_float8
from launcher.train.loop import Trainer
from launcher.train.phase import Where
from launcher.train.rank import Rank, join_ranks, this_place, this_rank
from launcher.train.sharding.sharding import price_of_last
from runs import job, recipe

GPT = {"layers": 6, "dim": 32, "heads": 2, "context": 64, "dropout": 0.2}
PYDOC = "launcher.tasks.gpt:PydocGPT"
MICRO = 4
LIMIT = 2**30


def step(rank: Rank, sharding: str, task: str = PYDOC, **fields: Any) -> tuple[torch.Tensor, int, Trainer]:
    """Two micro-batches: gradient, peak bytes over building the model and forward and backward passes."""
    chosen = recipe(sharding, MICRO, 2, **fields)
    asked = job(task=task, args=GPT, batch={"global": 2 * MICRO * rank.world})
    with MemoryBudget(LIMIT) as budget:
        trainer = Trainer(Rank(**{**vars(rank), "recipe": chosen, "job": asked}), Where(), budget)
        trainer.optimizer = Capture(trainer.model.parameters())
        trainer.train_step(1)
    return trainer.optimizer.gradient, budget.peak, trainer


def compared(rank: Rank, sharding: str) -> dict[str, Any]:
    kept, peak, keeper = step(rank, sharding)
    result: dict[str, Any] = {"peaks": {"keep": peak}, "equal": {}, "names": {}}
    for activations in ("selective", "every-second", "checkpoint", "offload"):
        gradient, peak, trainer = step(rank, sharding, activations=activations)
        result["equal"][activations] = torch.equal(gradient, kept)
        result["names"][activations] = list(trainer.model.state_dict()) == list(keeper.model.state_dict())
        result["peaks"][activations] = peak
    chunked, *_ = step(rank, sharding, loss_chunks=5)
    result["chunked"] = distance(chunked, kept)
    chunked, *_ = step(rank, sharding, task="ragged:HeadApart", loss_chunks=5)
    result["chunked, the head a unit of its own"] = distance(chunked, kept)
    mixed, *_ = step(rank, sharding, precision="bf16-mixed")
    recomputed, *_ = step(rank, sharding, precision="bf16-mixed", activations="checkpoint")
    chunked, *_ = step(rank, sharding, precision="bf16-mixed", loss_chunks=5)
    result["equal"]["checkpoint in bf16-mixed"] = torch.equal(mixed, recomputed)
    result["chunked in bf16-mixed"] = distance(chunked, mixed)
    _, result["peaks"]["checkpoint, chunked"], _ = step(
        rank, sharding, activations="checkpoint", loss_chunks=5
    )
    half, result["peaks"]["checkpoint, half"], _ = step(
        rank, sharding, activations="checkpoint", checkpoint_ratio=0.5
    )
    result["equal"]["half of the blocks checkpointed"] = torch.equal(half, kept)
    last, result["peaks"]["last"], _ = step(rank, sharding, grad_sync="last")
    result["last"] = distance(last, kept)
    result["price"] = price_of_last(keeper.model, keeper.rank.recipe)
    if sharding == "fsdp":
        result |= in_float8(rank, sharding, mixed, list(keeper.model.state_dict()))
    return result


def in_float8(rank: Rank, sharding: str, mixed: torch.Tensor, names: list[str]) -> dict[str, Any]:
    """Emulated: the same roundings, without the matrix products of a GPU."""
    model.to_float8 = partial(to_float8, emulate=True)
    eight, _, trainer = step(rank, sharding, precision="float8")
    recomputed, *_ = step(rank, sharding, precision="float8", activations="checkpoint")
    return {
        "float8": distance(eight, mixed),
        "float8 equal when recomputed": torch.equal(eight, recomputed),
        "float8 names": list(trainer.model.state_dict()) == names,
        "float8 layers": [n for n, m in trainer.model.named_modules() if type(m).__name__ == "Float8Linear"],
    }


def main(out: Path) -> None:
    rank = this_rank(this_place())
    join_ranks(rank)
    shardings = ("none",) if rank.world == 1 else ("ddp", "fsdp")
    result = {sharding: compared(rank, sharding) for sharding in shardings}
    if rank.first:
        out.write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Run on every rank by test_policies.py: compiled blocks under FSDP against eager ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

from gradients import Capture, distance
from launcher.train.cpu_memory_budget import Unlimited
from launcher.train.loop import Trainer
from launcher.train.phase import Where
from launcher.train.rank import Rank, join_ranks, this_place, this_rank
from runs import job, recipe

GPT = {"layers": 12, "dim": 16, "heads": 2, "context": 16}


def gradient(rank: Rank, sharding: str, **fields: Any) -> torch.Tensor:
    asked = job(task="launcher.tasks.gpt:PydocGPT", args=GPT, batch={"global": 4 * rank.world})
    chosen = recipe(sharding, 2, 2, **fields)
    trainer = Trainer(Rank(**{**vars(rank), "recipe": chosen, "job": asked}), Where(), Unlimited())
    trainer.optimizer = Capture(trainer.model.parameters())
    trainer.train_step(1)
    captured: torch.Tensor = trainer.optimizer.gradient
    return captured


def main(out: Path) -> None:
    rank = this_rank(this_place())
    join_ranks(rank)
    eager = gradient(rank, "fsdp")
    result: dict[str, Any] = {}
    cases = [
        ("fsdp", "keep"),
        ("fsdp", "checkpoint"),
        ("fsdp", "selective"),
        ("fsdp", "every-second"),
        ("fsdp", "budget"),
        ("ddp", "keep"),
    ]
    for sharding, activations in cases:
        torch._dynamo.reset()
        counters.clear()
        more = {"activation_budget": 0.3} if activations == "budget" else {}
        compiled = gradient(rank, sharding, compile=True, activations=activations, **more)
        result[f"{sharding} {activations}"] = {
            "distance": distance(compiled, eager),
            "graphs": counters["stats"]["unique_graphs"],
            "breaks": dict(counters["graph_break"]),
        }
    if rank.first:
        out.write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Run on every rank by test_compression.py: gradients and peaks with exact and compressed activations."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from gradients import Capture, distance
from launcher.train.cpu_memory_budget import MemoryBudget
from launcher.train.loop import Trainer
from launcher.train.phase import Where
from launcher.train.rank import Rank, join_ranks, this_place, this_rank
from runs import first_cases, job, recipe

LLAMA = {"layers": 4, "dim": 64, "heads": 2, "kv_heads": 1, "hidden": 128, "vocabulary": 256}
MICRO = 4
CASES: dict[int, list[dict[str, Any]]] = {
    2: [
        {"sharding": "fsdp", "precision": "bf16-mixed"},
        {"sharding": "ddp"},
        {"sharding": "ddp", "precision": "bf16-mixed"},
        {"sharding": "fsdp-keep", "precision": "bf16"},
        {"sharding": "fsdp", "adapter": {"kind": "lora", "rank": 4}},
    ],
    4: [{"sharding": "hybrid"}, {"sharding": "hybrid", "precision": "bf16-mixed"}],
}


def step(rank: Rank, activations: str, sharding: str, **fields: Any) -> tuple[torch.Tensor, int]:
    """Return the gradient of two micro-batches, and the peak bytes."""
    adapter = fields.pop("adapter", None)
    asked = job(
        task="launcher.tasks.llama:LanguageModel",
        args={"model": LLAMA, "context": 64},
        batch={"global": 2 * MICRO * rank.world},
        adapter=adapter,
    )
    chosen = recipe(sharding, MICRO, 2, activations=activations, **fields)
    with MemoryBudget(None) as budget:
        trainer = Trainer(Rank(**{**vars(rank), "recipe": chosen, "job": asked}), Where(), budget)
        if adapter is not None:  # otherwise the zeros of B leave A without a gradient
            with torch.no_grad():
                for name, p in trainer.model.named_parameters():
                    if ".lora_B." in name:
                        p.fill_(0.02)
        trainer.optimizer = Capture(p for p in trainer.model.parameters() if p.requires_grad)
        trainer.train_step(1)
    return trainer.optimizer.gradient.float(), budget.peak


def compared(rank: Rank, case: dict[str, Any]) -> dict[str, Any]:
    (exact, most), (first, less), (second, _) = (
        step(rank, activations, **case) for activations in ("keep", "compress", "compress")
    )
    return {
        "distance": distance(first, exact),
        "repeated": torch.equal(first, second),
        "peaks": [most, less],
    }


def main(out: Path) -> None:
    rank = this_rank(this_place())
    join_ranks(rank)
    cases = first_cases(CASES[rank.world], 1)
    found = {" ".join(map(str, case.values())): compared(rank, case) for case in cases}
    if rank.first:
        out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

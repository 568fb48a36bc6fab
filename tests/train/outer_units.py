"""Run on every rank by test_outer_units.py: a step with the embedding and the head as FSDP units of their
own, and the same step with both in the root."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gradients import Capture
from launcher.tasks.gpt import GPT, PydocGPT
from launcher.train.cpu_memory_budget import MemoryBudget
from launcher.train.loop import Trainer
from launcher.train.phase import Where
from launcher.train.rank import Rank, join_ranks, this_place, this_rank
from runs import first_cases, job, recipe

ARGS = {"layers": 3, "dim": 32, "heads": 2, "context": 32}
CASES: dict[int, list[dict[str, Any]]] = {
    2: [
        {"sharding": "fsdp"},
        {"sharding": "fsdp", "precision": "bf16", "grad_sync": "last", "loss_chunks": 5},
        {"sharding": "fsdp-keep", "precision": "bf16-mixed", "loss_chunks": 5},
        {"sharding": "fsdp", "loss_chunks": 5},
        {"sharding": "fsdp", "precision": "bf16-mixed", "activations": "checkpoint", "loss_chunks": 5},
        {"sharding": "fsdp", "offload": "cpu", "grad_sync": "last", "activations": "selective"},
    ],
    4: [
        {"sharding": "hybrid", "loss_chunks": 5},
        {"sharding": "hybrid", "precision": "bf16-mixed", "grad_sync": "last"},
    ],
}


class Rooted(PydocGPT):
    """The root gathers all that is outside of the blocks."""

    def outer_units(self, model: nn.Module) -> list[nn.Module]:
        return []


class Direct(PydocGPT):
    """Multiplies with the weight of the head, which is not gathered then."""

    def model(self) -> nn.Module:
        return DirectGPT(self.layers, self.dim, self.heads, self.context, self.dropout)


class DirectGPT(GPT):
    def forward(self, tokens: torch.Tensor, targets: torch.Tensor, loss_chunks: int) -> Any:
        logits = functional.linear(self.tokens(tokens), self.head.weight).flatten(0, 1)
        return functional.cross_entropy(logits, targets.flatten(), reduction="sum"), targets.numel()


class DirectRooted(Direct, Rooted):
    pass


class Reading(PydocGPT):
    """Reads the weight of the head after the head and the model were called."""

    def loss(self, model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total, weight = super().loss(model, batch)
        return total + 1e-3 * model.head.weight.square().sum(), weight


class ReadingRooted(Reading, Rooted):
    pass


class Peak(Capture):
    """Also takes the peak of the passes."""

    budget: MemoryBudget
    peak = 0

    def step(self, closure: Any = None) -> None:
        self.peak = self.budget.take_peak()
        super().step()


def step(rank: Rank, task: str, fields: dict[str, Any]) -> dict[str, Any]:
    chosen = recipe(**fields, micro=2, accumulation=2)
    asked = job(task=task, args=ARGS, batch={"global": 4 * rank.world})
    with MemoryBudget(2**30) as budget:
        trainer = Trainer(Rank(**{**vars(rank), "recipe": chosen, "job": asked}), Where(), budget)
        trainer.optimizer = Peak(trainer.model.parameters())
        trainer.optimizer.budget = budget
        budget.take_peak()
        result = trainer.train_step(1)
    collectives = trainer.recovery.collectives
    assert collectives is not None
    return {
        "gradient": trainer.optimizer.gradient,
        "result": (result.loss, result.weight, result.grad_norm),
        "names": list(trainer.model.state_dict()),
        "peak": trainer.optimizer.peak,
        # The micro-batch in which gradients are reduced.
        "collectives": Counter(entry.name for entry in max(collectives._known.values(), key=len)),
        "static": collectives.static,
    }


def main(out: Path) -> None:
    rank = this_rank(this_place())
    join_ranks(rank)
    found = {}
    for fields in first_cases(CASES[rank.world], 3):
        apart = step(rank, "launcher.tasks.gpt:PydocGPT", fields)
        rooted = step(rank, "outer_units:Rooted", fields)
        found[" ".join(map(str, fields.values()))] = {
            "equal": torch.equal(apart.pop("gradient"), rooted.pop("gradient")),
            "apart": apart,
            "rooted": rooted,
        }
    if rank.first:
        out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

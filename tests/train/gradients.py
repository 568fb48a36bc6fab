"""Run on every rank by test_gradients.py: the gradient of one step, for each sharding and split."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from launcher.train.cpu_memory_budget import Unlimited
from launcher.train.loop import Trainer
from launcher.train.phase import Where
from launcher.train.rank import Rank, join_ranks, this_place, this_rank
from launcher.train.rng import seed_all
from launcher.train.seeds import derive_seed
from ragged import Ragged
from runs import HERE, job, recipe

SHARE = 8  # samples per rank and step
CLIP = 0.01


class Capture(torch.optim.SGD):
    """Keeps the whole gradient that an optimizer is given."""

    gradient: torch.Tensor

    def step(self, closure: Any = None) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        full = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]
        self.gradient = torch.cat([g.flatten() for g in full]).clone()


def captured(
    rank: Rank, sharding: str, micro: int, clip: float | None, precision: str, grad_sync: str = "each"
) -> tuple[Any, Any]:
    chosen = recipe(sharding, micro, SHARE // micro, precision=precision, grad_sync=grad_sync)
    asked = job(batch={"global": SHARE * rank.world}, steps=1, train={"clip_norm": clip, "lr": 1.0})
    trainer = Trainer(Rank(**{**vars(rank), "recipe": chosen, "job": asked}), Where(), Unlimited())
    trainer.optimizer = Capture(trainer.model.parameters())
    return trainer.train_step(1), trainer.optimizer.gradient


def whole_batch(rank: Rank) -> tuple[torch.nn.Module, Ragged, list[Any]]:
    """The same model and the same samples, without launcher's loop."""
    asked = job(batch={"global": SHARE * rank.world})
    seed_all(derive_seed("model", asked.train.seed))
    task = Ragged()
    model, data = task.model(), task.data("train")
    trainer = Trainer(
        Rank(**{**vars(rank), "recipe": recipe(_shardings(rank.world)[0], SHARE), "job": asked}),
        Where(),
        Unlimited(),
    )
    return model, task, [data[index] for index in trainer.data.order.step(1)]


def reference(model: torch.nn.Module, task: Ragged, samples: list[Any], micro: int | None) -> torch.Tensor:
    """`micro` None: the sum over all tokens, divided once. Else the mean of the micro-batches' means."""
    model.zero_grad()
    parts = [samples[i : i + micro] for i in range(0, len(samples), micro)] if micro else [samples]
    for part in parts:
        total, weight = task.loss(model, task.collate(part))
        (total / weight / len(parts)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()]).clone()


def layout(rank: Rank) -> dict[str, Any]:
    """Who shares a shard, and how much of a parameter a rank holds."""
    asked = job(batch={"global": SHARE * rank.world})
    chosen = recipe("hybrid", SHARE)
    trainer = Trainer(Rank(**{**vars(rank), "recipe": chosen, "job": asked}), Where(), Unlimited())
    weight = trainer.model.head.weight
    assert isinstance(weight, DTensor)
    return {
        "rows": weight.device_mesh.mesh.tolist(),
        "share": weight.to_local().numel() / weight.numel(),
    }


def _shardings(world: int) -> list[str]:
    return {1: ["none", "fsdp"], 2: ["ddp", "fsdp", "fsdp-keep"], 4: ["hybrid"]}[world]


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def main(out: Path) -> None:
    rank = this_rank(this_place())
    join_ranks(rank)
    model, task, samples = whole_batch(rank)
    exact = reference(model, task, samples, None)
    result: dict[str, Any] = {"norm": float(exact.norm()), "splits": {}, "clipped": {}, "mixed": {}}
    for sharding in _shardings(rank.world):
        for micro, grad_sync in (
            (8, "each"),
            (4, "each"),
            (2, "each"),
            (1, "each"),
            (2, "last"),
            (1, "last"),
        ):
            step, gradient = captured(rank, sharding, micro, None, "fp32", grad_sync)
            name = f"{sharding} {micro}x{SHARE // micro} {grad_sync}"
            result["splits"][name] = {
                "distance": distance(gradient, exact),
                "norm": step.grad_norm,
                "weight": step.weight,
            }
        _, clipped = captured(rank, sharding, 2, CLIP, "fp32")
        result["clipped"][sharding] = distance(clipped, exact * CLIP / exact.norm())
        _, mixed = captured(rank, sharding, 2, None, "bf16-mixed")
        result["mixed"][sharding] = distance(mixed, exact)
    if rank.world == 4:
        result["layout"] = layout(rank)
    # In fours the two halves of one rank's samples happen to have as many tokens.
    naive = {micro: distance(reference(model, task, samples, micro), exact) for micro in (2, 1)}
    result["mean of means"] = naive
    result["tokens"] = sum(int((targets >= 0).sum()) for _, targets in samples)
    if rank.first:
        out.write_text(json.dumps(result))


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    main(Path(sys.argv[1]))

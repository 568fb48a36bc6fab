"""Run on every rank by test_step_in_backward.py: the same training with both kinds of `optimizer_step`."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from launcher.rundir.layout import RunDir
from launcher.train.cpu_memory_budget import MemoryBudget
from launcher.train.local_shards import local
from launcher.train.loop import Trainer
from launcher.train.phase import Where
from launcher.train.rank import Rank, join_ranks, this_place, this_rank
from optimizers import BATCH, OPTIMIZERS, digest
from ragged import Ragged
from runs import job, recipe

STEPS = 2


class Steep(Ragged):
    """A finite loss in step 3 whose gradient is not finite."""

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        loss, weight = super().loss(model, batch)
        if self.calls == 3:
            loss = loss + 0 * torch.sqrt(loss - loss.detach())  # the root's slope at 0 is infinite
        return loss, weight


class Twice(Ragged):
    """A block that the model uses twice."""

    def model(self) -> nn.Module:
        model = super().model()
        model.layers.append(model.layers[0])
        return model


class Peeking(Ragged):
    """Blocks that compute with the output layer's weight behind autograd's back."""

    def model(self) -> nn.Module:
        model = super().model()
        for number, layer in enumerate(model.layers):
            model.layers[number] = Scaled(layer, lambda: model.head.weight)
        return model


class Scaled(nn.Module):
    def __init__(self, layer: nn.Module, other: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.other = layer, other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * torch.sigmoid(self.other().detach().sum())


class Infinite(Ragged):
    """A loss in step 3 that is not finite, on one rank alone."""

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        loss, weight = super().loss(model, batch)
        if self.calls == 3 and os.environ["RANK"] == "1":
            loss = loss + math.inf
        return loss, weight


def made(rank: Rank, when: str, fields: dict[str, str], run: RunDir) -> Trainer:
    chosen = recipe(**fields, micro=BATCH // rank.world, optimizer_step=when)
    asked = job(
        task="launcher.tasks.gpt:PydocGPT",
        args={"layers": 2, "dim": 72, "context": 16},
        batch={"global": BATCH},
        steps=2 * STEPS,
        train={"lr": 1e-3, "clip_norm": None},
    )
    # Under a budget a step after the backward pass frees its gradients, too.
    return Trainer(
        Rank(**{**vars(rank), "recipe": chosen, "job": asked, "run": run}), Where(), MemoryBudget(None)
    )


def results(one: Trainer, first: int, last: int) -> list[list[float]]:
    found = [one.train_step(step) for step in range(first, last + 1)]
    return [[step.loss, step.weight, step.grad_norm, step.lr] for step in found]


def compared(rank: Rank, folder: Path, fields: dict[str, str]) -> dict[str, Any]:
    """What each kind of step computes; the second half also after a checkpoint of the other kind."""
    found: dict[str, Any] = {}
    runs = {when: RunDir(folder / f"{' '.join(fields.values())} {when}") for when in ("after", "backward")}
    for when, run in runs.items():
        run.path.mkdir(exist_ok=True)
        one = made(rank, when, fields, run)
        steps = results(one, 1, STEPS)
        saved = one.checkpoints.save(STEPS)
        assert saved is not None and saved.problem is None, saved
        steps += results(one, STEPS + 1, 2 * STEPS)
        gradients = sum(local(p.grad).nbytes for p in one.model.parameters() if p.grad is not None)
        found[when] = {"steps": steps, "digest": digest(one), "gradients": gradients}
    for when, other in (("after", "backward"), ("backward", "after")):
        one = made(rank, when, fields, runs[other])
        assert one.checkpoints.restore() == STEPS
        found[f"{when} resumed"] = {"steps": results(one, STEPS + 1, 2 * STEPS), "digest": digest(one)}
    return found


CASES: dict[str, list[dict[str, str]]] = {
    "one": [
        {"sharding": "none"},
        {"sharding": "none", "precision": "bf16", "optimizer": "adamw-bf16", "activations": "checkpoint"},
        {"sharding": "fsdp", "activations": "offload"},
    ],
    "short": [
        {"sharding": "fsdp"},
        {"sharding": "fsdp-keep", "activations": "selective"},
        {"sharding": "fsdp", "precision": "bf16", "optimizer": "adamw-8bit", "loss_chunks": "3"},
    ],
    "two": [
        *({"sharding": "fsdp", "optimizer": optimizer} for optimizer in OPTIMIZERS),
        {"sharding": "fsdp", "activations": "compress"},
        {"sharding": "fsdp", "precision": "bf16-mixed", "activations": "checkpoint"},
        {"sharding": "fsdp", "precision": "bf16", "optimizer": "adamw-8bit", "activations": "every-second"},
        {"sharding": "fsdp", "precision": "bf16-mixed", "loss_chunks": "3"},
    ],
    "four": [{"sharding": "hybrid"}, {"sharding": "hybrid", "precision": "bf16-mixed"}],
}


def main(out: Path) -> None:
    rank = this_rank(this_place())
    join_ranks(rank)
    found = {" ".join(case.values()): compared(rank, out.parent, case) for case in CASES[os.environ["CASES"]]}
    out.with_name(f"rank {rank.number}.json").write_text(json.dumps(found))
    if rank.first:
        out.write_text("{}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

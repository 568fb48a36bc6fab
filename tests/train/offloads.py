"""Run on every rank by test_offload.py: one training that changes its offload at every step."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from launcher.rundir.layout import RunDir
from launcher.tasks import gpt
from launcher.train.cpu_memory_budget import Unlimited
from launcher.train.initialise import draw_normal
from launcher.train.loop import Trainer
from launcher.train.phase import Where
from launcher.train.rank import Rank, join_ranks, this_place, this_rank
from optimizers import OPTIMIZERS, digest, steps, trainer
from ragged import Ragged
from runs import job, recipe

# Every one of them reads what the one before has written.
ALL = ("none", "cpu-optimizer", "nvme-optimizer", "cpu", "none")
CASES = [
    *(("hybrid", optimizer, ALL if optimizer == "adamw-8bit" else ALL[1::2]) for optimizer in OPTIMIZERS),
    ("fsdp", "adamw", ALL),
    ("ddp", "adamw", ALL[:3]),
    ("zero1", "adamw", ALL[:3]),
]
MODEL = "crossing"  # blocks of 8-bit states cross rows and end with a shard


def changing(
    rank: Rank, folder: Path, sharding: str, optimizer: str, chain: tuple[str, ...]
) -> dict[str, Any]:
    nvme = folder / "nvme"
    nvme.mkdir(exist_ok=True)
    run = RunDir(folder / f"{sharding} {optimizer}")

    def made(offload: str) -> Trainer:
        return trainer(rank, optimizer, sharding, MODEL, run=run, offload=offload, nvme_dir=str(nvme))

    losses = []
    for step, offload in enumerate(chain, start=1):
        one = made(offload)
        assert one.checkpoints.restore() == step - 1
        losses += steps(one, step, step)
        saved = one.checkpoints.save(step)
        assert saved is not None and saved.problem is None, saved
    straight = made("none")
    return {
        "losses": [losses, steps(straight, 1, len(losses))],
        "digests": [digest(one), digest(straight)],
        "left in nvme_dir": os.listdir(nvme),
    }


class OnMeta(Ragged):
    """Shards and a buffer that are filled where they live."""

    built_on_meta = True

    def model(self) -> nn.Module:
        model = super().model()
        model.register_buffer("unused", torch.ones(3), persistent=False)
        return model

    def initialise(self, model: nn.Module, seed: int) -> None:
        for name, parameter in model.named_parameters():
            draw_normal(parameter, 0.1, seed, name)
        model.unused.fill_(2.0)


def from_meta(rank: Rank) -> list[Any]:
    """The bits after a step, and what became of the buffer, without and with parameters on the host."""
    found = []
    for offload in ("none", "cpu"):
        chosen = recipe("fsdp", 2, offload=offload)
        asked = job(task="offloads:OnMeta")
        made = Trainer(Rank(**{**vars(rank), "recipe": chosen, "job": asked}), Where(), Unlimited())
        steps(made, 1, 2)
        found.append([digest(made), made.model.unused.tolist(), "unused" in made.model.state_dict()])
    return found


def main(out: Path) -> None:
    rank = this_rank(this_place())
    join_ranks(rank)
    text = gpt.documentation()[:20_000]
    gpt.documentation = lambda: text
    result: dict[str, Any] = {
        "chains": {f"{case[0]} {case[1]}": changing(rank, out.parent, *case) for case in CASES},
        "from meta": from_meta(rank),
        "ddp": {name: steps(trainer(rank, name, "ddp", MODEL), 1, 2) for name in OPTIMIZERS},
    }
    out.with_name(f"rank {rank.number}.json").write_text(json.dumps(result))
    if rank.first:
        out.write_text("{}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

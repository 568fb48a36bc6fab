"""Run on every rank by test_lowering.py: trainings that run out of memory, next to ones that do not."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from launcher.runs.files import read_json_lines, replace_json
from launcher.runs.layout import RunDir
from launcher.spec.recipe import Recipe
from launcher.train.budget import open_budget
from launcher.train.drill import Drills, parse_drills
from launcher.train.failure import leave
from launcher.train.loop import Trainer
from launcher.train.rank import Rank, join_ranks, this_place, this_rank
from launcher.train.where import Where
from runs import HERE, job, recipe
from saves import Bits, bits, everywhere

STEPS = 4
PHASES = ("data", "forward", "backward")


class Training:
    """Some steps of a task; what is left of it, and what it tells."""

    def __init__(self, rank: Rank, folder: Path, asked: Recipe, text: str = "", **fields: Any) -> None:
        if rank.first:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        values = {"task": "normed:Normed", "steps": STEPS, "train": {"probe": "never"}, **fields}
        changes = {"run": RunDir(folder), "recipe": asked, "job": job(**values), "workdir": str(HERE)}
        rank = Rank(**{**vars(rank), **changes})
        where = Where()
        mine = [one for one in parse_drills(text, rank.world) if one.rank in (None, rank.number)]
        with open_budget(rank.device, where, Drills(mine, where, asked.micro_batch_size)) as budget:
            trainer = Trainer(rank, where, budget)
            self.finished = trainer.train()
            self.live = getattr(budget, "live", 0)
        self.bits: Bits = bits(trainer)
        self.recipe = trainer.in_force.recipe
        dist.barrier()
        self.losses = [line["loss"] for line in read_json_lines(trainer.rank.run.metrics)]
        self.steps = [line["step"] for line in read_json_lines(trainer.rank.run.metrics)]
        self.events = trainer.rank.run.read_events()


def distance(ours: Bits, theirs: Bits) -> float:
    """The largest relative difference over all ranks."""
    assert ours.keys() == theirs.keys()
    found = [0.0]
    for name, value in ours.items():
        scale = theirs[name].double().abs().max().item() or 1.0
        found.append((value.double() - theirs[name].double()).abs().max().item() / scale)
    return max(everywhere(max(found)))


def lowered(rank: Rank, folder: Path, first: Recipe, **fields: Any) -> dict[str, Any]:
    """Every phase, on all ranks or on one, in the first step and later."""
    fits = first.model_copy(
        update={"micro_batch_size": first.micro_batch_size // 2, "grad_accum": 2 * first.grad_accum}
    )
    knew = Training(rank, folder / "knew", fits, **fields)
    found: dict[str, Any] = {}
    for who in dict.fromkeys(("all", "first", "last")[: 3 if rank.world > 1 else 1]):
        for phase in PHASES:
            for step in (1, 3):
                text = f"rank={who},step={step},phase={phase},micro_batch={first.micro_batch_size}"
                ours = Training(rank, folder / "ours", first, text, **fields)
                downgrades = [event for event in ours.events if event["event"] == "downgrade"]
                found[text] = {
                    "distance": distance(ours.bits, knew.bits),
                    "recipe": ours.recipe == fits,
                    "steps": ours.steps,
                    "events": [[one["step"], one["phase"], one["in_process"]] for one in downgrades],
                    "seconds": max(one["seconds"] for one in downgrades) if downgrades else None,
                    "left": ours.live - knew.live,
                }
    return found


def main(out: Path) -> None:
    rank = this_rank(this_place())
    join_ranks(rank)
    folder = out.parent
    batch = {"batch": {"global": 8 * rank.world}}
    if rank.world == 1:
        cases = {"none": recipe("none", 8)}
    elif rank.world == 4:
        cases = {"hybrid": recipe("hybrid", 8)}
    else:
        cases = {
            "fsdp": recipe("fsdp", 8),
            "fsdp, accumulation": recipe("fsdp", 4, 2, activations="checkpoint"),
            "fsdp-keep": recipe("fsdp-keep", 8),
            "cpu offload": recipe("fsdp", 8, offload="cpu"),
        }
    result = {name: lowered(rank, folder / name, asked, **batch) for name, asked in cases.items()}
    if rank.first:
        replace_json(out, result)
    dist.barrier()
    leave(0)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    torch.manual_seed(0)
    main(Path(sys.argv[1]))

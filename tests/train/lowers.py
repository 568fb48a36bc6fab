"""Run on every rank by test_lowering.py: trainings that run out of memory, next to ones that do not."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from launcher.rundir.files import read_json_lines, replace_json
from launcher.rundir.layout import RunDir
from launcher.spec.events import Climb, Downgrade, Probed
from launcher.spec.fire_drill import BUDGET
from launcher.spec.recipe import Recipe
from launcher.train.cpu_memory_budget import MemoryBudget, open_budget
from launcher.train.drill import Drills, parse_drills
from launcher.train.error_report import leave
from launcher.train.loop import Trainer
from launcher.train.phase import Where
from launcher.train.rank import Rank, join_ranks, this_place, this_rank
from launcher.train.recovery import fallback
from launcher.train.recovery.current_recipe import CurrentRecipe
from runs import HERE, job, recipe
from saves import Bits, bits, different, everywhere

STEPS = 4
CASES = (
    "rank=all,step=1,phase=forward,allocation=1",
    "rank=all,step=3,phase=backward,allocation=4",
    "rank=all,step=3,phase=data,allocation=1",
    "rank=first,step=1,phase=backward,allocation=1",
    "rank=first,step=3,phase=forward,allocation=5",
    "rank=last,step=1,phase=data,allocation=1",
    "rank=last,step=3,phase=backward,allocation=9",
)


class Training:
    """Some steps of a task; what is left of it, and what it tells."""

    def __init__(
        self,
        rank: Rank,
        folder: Path,
        asked: Recipe,
        text: str = "",
        change: tuple[int, Recipe] | None = None,
        **fields: Any,
    ) -> None:
        """`text`: of a drill. `change`: before that step, without a failure."""
        if rank.first:
            folder.mkdir(parents=True)
        dist.barrier()
        values = {"task": "normed:Normed", "steps": STEPS, "train": {"probe": "always"}, **fields}
        changes = {"run": RunDir(folder), "recipe": asked, "job": job(**values), "workdir": str(HERE)}
        rank = Rank(**{**vars(rank), **changes})
        where = Where()
        mine = [one for one in parse_drills(text, rank.world) if one.rank in (None, rank.number)]
        with open_budget(rank.device, where, Drills(mine, where, asked.micro_batch_size)) as budget:
            trainer = Trainer(rank, where, budget)
            if change is not None:
                trainer.current.climb = partial(_change, trainer.current, *change)
            trainer.train()
            self.live = getattr(budget, "live", 0)
        self.bits: Bits = bits(trainer)
        self.recipe = trainer.current.recipe
        dist.barrier()
        self.losses = [line["loss"] for line in read_json_lines(trainer.rank.run.metrics)]
        self.steps = [line["step"] for line in read_json_lines(trainer.rank.run.metrics)]
        self.events = trainer.rank.run.read_events()


def _change(current: CurrentRecipe, at: int, recipe: Recipe, step: int) -> None:
    if step == at:
        current._take(recipe)


def lowered(rank: Rank, folder: Path, first: Recipe, **fields: Any) -> dict[str, Any]:
    """On all ranks or on one, in the first step and later."""
    fits = first.model_copy(
        update={"micro_batch_size": first.micro_batch_size // 2, "grad_accum": 2 * first.grad_accum}
    )
    knew = {
        step: Training(rank, folder / f"knew {step}", first, change=(step, fits), **fields) for step in (1, 3)
    }
    found: dict[str, Any] = {}
    for text in CASES if rank.world > 1 else CASES[:3]:
        step = int(text.split("step=")[1][0])
        ours = Training(rank, folder / text, first, text, **fields)
        downgrades = [event for event in ours.events if isinstance(event, Downgrade)]
        found[text] = {
            "different": everywhere(different(ours.bits, knew[step].bits)),
            "recipe": ours.recipe == fits,
            "steps": ours.steps,
            "events": [[one.step, one.phase, one.in_process] for one in downgrades],
            "seconds": max(one.seconds for one in downgrades) if downgrades else None,
            "left": ours.live - knew[step].live,
        }
    return found


def outgrown(rank: Rank, folder: Path, asked: Recipe, **fields: Any) -> dict[str, Any]:
    """The task's example is not its longest sample. In a budget between the two, a longer one comes."""
    limits = everywhere(_between_example_and_longest(rank, folder / "limits", asked, **fields))
    os.environ[BUDGET] = str(max(limits))
    ours = Training(rank, folder / "ours", asked, task="ragged:Ragged", **{"steps": STEPS, **fields})
    del os.environ[BUDGET]
    return {
        "events": [[one.kind, one.as_json().get("phase")] for one in ours.events],
        "sizes": [one.micro_batch_size for one in ours.events if isinstance(one, Probed)],
        "steps": ours.steps,
    }


def varying(rank: Rank, folder: Path, asked: Recipe, **fields: Any) -> dict[str, Any]:
    """Batches of one step differ in how many tensors they have."""
    fields = {"task": "varying:Varying", "steps": STEPS, **fields}
    ours = Training(rank, folder / "ours", asked, **fields)
    without = Training(rank, folder / "without", asked, train={"probe": "never"}, **fields)
    return {
        "different": everywhere(different(ours.bits, without.bits)),
        "steps": ours.steps,
        "asked": [one.asked for one in ours.events if isinstance(one, Probed)],
    }


def _between_example_and_longest(rank: Rank, folder: Path, asked: Recipe, **fields: Any) -> int:
    """Bytes that do for `asked` with the example, and do not with the longest sample."""
    if rank.first:
        folder.mkdir(parents=True)
    dist.barrier()
    changes = {"run": RunDir(folder), "recipe": asked, "workdir": str(HERE)}
    rank = Rank(**{**vars(rank), **changes, "job": job(task="ragged:Ragged", **fields)})
    with MemoryBudget(2**40) as budget:
        trainer = Trainer(rank, Where(), budget)
        probe, found = trainer.current.probe, []
        for sample in (trainer.task.example(), max(trainer.task.data("train"), key=lambda one: len(one[0]))):
            probe.sample, low, high = sample, 0, 2**24
            while high - low > 2**10:
                budget.limit = (low + high) // 2
                low, high = (low, budget.limit) if probe.fits(asked) else (budget.limit, high)
            found.append(high)
    assert found[0] < found[1], "else this test shows nothing"
    return sum(found) // 2


def climbs(rank: Rank, folder: Path, asked: Recipe, **fields: Any) -> dict[str, Any]:
    """A failure that passes; and one that comes again."""
    fallback.CLIMB_AFTER = 3
    once, twice = "rank=last,step=2,phase=forward", "rank=last,step=6,phase=backward"
    found = {}
    for name, text in {"passes": once, "comes again": f"{once};{twice}"}.items():
        ours = Training(rank, folder / name, asked, text, **{**fields, "steps": 12})
        changes = [one for one in ours.events if isinstance(one, Downgrade | Climb)]
        found[name] = [[one.kind, one.step] for one in changes]
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
            "fsdp-layers": recipe("fsdp-layers", 8, activations="checkpoint"),
            "cpu offload": recipe("fsdp", 8, offload="cpu"),
        }
    result = {name: lowered(rank, folder / name, asked, **batch) for name, asked in cases.items()}
    further = {}
    if rank.world < 4:
        asked = recipe("fsdp" if rank.world == 2 else "none", 2, 4)
        further["varying"] = varying(rank, folder / "varying", asked, **batch)
    if rank.world == 2:
        further["outgrown"] = outgrown(rank, folder / "outgrown", recipe("fsdp", 8), **batch)
        further["climbs"] = climbs(rank, folder / "climbs", recipe("fsdp", 8), **batch)
    if rank.first:
        replace_json(out, {"lowered": result, **further})
    dist.barrier()
    leave(0)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    torch.manual_seed(0)
    main(Path(sys.argv[1]))

"""Run on every rank: the least budget, in bytes, under which each recipe of `cases.json` trains two steps.

Each recipe is trained without a limit, to learn its peak; then under exactly that many bytes, under a byte
less, and under what the next recipe needs. All ranks have as many bytes and run out at the same place.
"""

from __future__ import annotations

import gc
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from launcher.spec.job import Job
from launcher.spec.recipe import Recipe
from launcher.train.cpu_memory_budget import MemoryBudget
from launcher.train.error_report import leave
from launcher.train.loop import Trainer
from launcher.train.rank import Rank, join_ranks, this_place, this_rank


def trained(rank: Rank, case: dict[str, Any], limit: int) -> tuple[int, list[float] | None]:
    """Return the peak in bytes and the losses of two steps; no losses if memory ran out."""
    gc.collect()
    recipe = Recipe.model_validate(case["recipe"])
    budget = MemoryBudget(limit)
    try:
        with budget, redirect_stdout(None):
            trainer = Trainer(
                Rank(**{**vars(rank), "job": Job.model_validate(case["job"]), "recipe": recipe}),
                budget.where,
                budget,
            )
            losses = [trainer.train_step(step).loss for step in (1, 2)]
    except torch.OutOfMemoryError:
        return budget.peak, None
    return budget.peak, losses


def main(out: Path) -> None:
    rank = this_rank(this_place())
    join_ranks(rank)
    cases = json.loads((out.parent / "cases.json").read_text())
    for case in cases:  # 8-bit optimizers keep two tables of 1 KiB for the rest of the process
        trained(rank, case, sys.maxsize)
    found = [dict(zip(("peak", "losses"), trained(rank, case, sys.maxsize), strict=True)) for case in cases]
    for case, one, less in zip(cases, found, [*found[1:], {"peak": 0}], strict=True):
        limits = {"exact": one["peak"], "a byte less": one["peak"] - 1, "next": less["peak"]}
        one |= {name: trained(rank, case, limit)[1] for name, limit in limits.items()}
    everywhere: list[Any] = [None] * rank.world
    dist.all_gather_object(everywhere, found)
    if rank.first:
        out.write_text(json.dumps(everywhere))
    dist.barrier()
    leave(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

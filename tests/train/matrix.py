"""Recipes that train a small GPT on real text for 20 steps, one after the other in the same ranks.

`python matrix.py OUT` on every rank, the recipes in `RECIPES` (a JSON file): OUT gets a loss curve for each.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

from launcher.spec.job import Job
from launcher.spec.recipe import Recipe
from launcher.train.cpu_memory_budget import Unlimited
from launcher.train.error_report import leave
from launcher.train.loop import Trainer
from launcher.train.phase import Where
from launcher.train.rank import Rank, join_ranks, this_place, this_rank

STEPS = int(os.environ.get("STEPS", "20"))
BATCH = 8
# Two accumulated micro-batches on 4 ranks, so that grad_sync and the division matter.
JOB = {
    "name": "matrix",
    "task": "launcher.tasks.gpt:PydocGPT",
    "args": {"layers": 2, "dim": 32, "heads": 2, "context": 32},
    "batch": {"global": BATCH},
    "steps": STEPS,
    "train": {"lr": 1e-3, "checkpoint_every": None, "warmup_steps": 4},
}


def curve(rank: Rank, recipe: dict[str, Any], fields: dict[str, Any] = JOB, **train: Any) -> list[float]:
    """The loss of each step of a job with these fields."""
    job = Job.model_validate({**fields, "train": {**fields["train"], **train}})
    trainer = Trainer(
        Rank(**{**vars(rank), "recipe": Recipe.model_validate(recipe), "job": job}), Where(), Unlimited()
    )
    losses = [trainer.train_step(step).loss for step in range(1, STEPS + 1)]
    del trainer
    gc.collect()  # FSDP's modules hold each other in cycles
    return losses


def main() -> None:
    rank = this_rank(this_place())
    join_ranks(rank)
    nvme = os.environ["NVME_DIR"]
    recipes = json.loads(Path(os.environ["RECIPES"]).read_text())
    curves: list[Any] = []
    for recipe in recipes:
        try:
            curves.append(curve(rank, recipe, nvme_dir=nvme))
        except Exception as error:  # its peers fail alike; the next recipe is another story
            curves.append(f"{type(error).__name__}: {error}")
    if rank.first:
        Path(sys.argv[1]).write_text(json.dumps(curves))
    leave(0)


if __name__ == "__main__":
    main()

"""Run on one and on two ranks by test_examples.py: three steps of each task."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from launcher.train.cpu_memory_budget import Unlimited
from launcher.train.loop import Trainer
from launcher.train.phase import Where
from launcher.train.rank import Rank, join_ranks, this_place, this_rank
from runs import job, recipe

TASKS = (
    ("llama:LanguageModel", {"context": 32, "model": {"tied": True}}, {"loss_chunks": 2}),
    ("brain:BrainAutoencoder", {"parts": 2}, {"activations": "checkpoint", "precision": "bf16-mixed"}),
    ("images:DigitClassifier", {}, {"precision": "bf16"}),
    ("video:VideoLanguageModel", {"max_frames": 3}, {}),
)


def main(out: Path) -> None:
    rank = this_rank(this_place())
    join_ranks(rank)
    result = {}
    for name, args, fields in TASKS:
        chosen = recipe("fsdp" if rank.world > 1 else "none", 8 // rank.world, **fields)
        asked = job(task=f"launcher.tasks.{name}", args=args, train={"lr": 1e-3})
        trainer = Trainer(Rank(**{**vars(rank), "job": asked, "recipe": chosen}), Where(), Unlimited())
        result[name] = [trainer.train_step(step).loss for step in (1, 2, 3)]
    if rank.first:
        out.write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

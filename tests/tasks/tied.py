"""Run on one and on two ranks by test_huggingface.py: three steps from a checkpoint, saved and resumed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from launcher.train.cpu_memory_budget import Unlimited
from launcher.train.loop import Trainer
from launcher.train.phase import Where
from launcher.train.rank import Rank, join_ranks, this_place, this_rank
from runs import job, recipe


def main(out: Path) -> None:
    rank = this_rank(this_place())
    join_ranks(rank)
    args = {"path": os.environ["CHECKPOINT"], "context": 16}
    asked = job(task="launcher.tasks.huggingface:CausalLM", args=args, train={"lr": 1e-2, "seed": 3})
    sharding = "fsdp" if rank.world > 1 else "none"
    fields = {**vars(rank), "job": asked, "recipe": recipe(sharding, 8 // rank.world)}
    trainer = Trainer(Rank(**fields), Where(), Unlimited())
    losses = [trainer.train_step(step).loss for step in (1, 2)]
    saved = trainer.checkpoints.save(2)
    assert saved is not None and saved.problem is None
    losses.append(trainer.train_step(3).loss)
    again = Trainer(Rank(**fields), Where(), Unlimited())
    assert again.checkpoints.restore() == 2
    losses.append(again.train_step(3).loss)
    tied = [
        one.model.get_output_embeddings().weight is one.model.get_input_embeddings().weight
        for one in (trainer, again)
    ]
    if rank.first:
        parameters = sum(p.numel() for group in trainer.optimizer.param_groups for p in group["params"])
        out.write_text(json.dumps({"losses": losses, "tied": tied, "parameters": parameters}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

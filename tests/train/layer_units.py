"""Run on every rank by test_layer_units.py: steps in which a block's layers are gathered one at a time, and
the same steps in which the block is gathered as a whole."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from launcher.train.cpu_memory_budget import Unlimited
from launcher.train.loop import Trainer
from launcher.train.phase import Where
from launcher.train.rank import Rank, join_ranks, this_place, this_rank
from runs import first_cases, job, recipe

MODEL = {"layers": 2, "dim": 64, "heads": 4, "kv_heads": 2, "hidden": 256, "vocabulary": 260}
ARGS = {"model": MODEL, "context": 32}
CASES: dict[int, list[dict[str, Any]]] = {
    2: [
        {"activations": "checkpoint", "precision": "bf16-mixed"},
        {"activations": "selective", "grad_sync": "last"},
        {"offload": "cpu", "optimizer_step": "backward"},
        {"precision": "bf16", "loss_chunks": 3},
        {"activations": "every-second", "precision": "bf16"},
        {"activations": "checkpoint", "checkpoint_ratio": 0.5, "grad_sync": "last"},
        {"activations": "offload", "precision": "bf16-mixed"},
        {"activations": "compress"},
        {"offload": "cpu-optimizer", "optimizer": "adamw-8bit", "activations": "checkpoint"},
    ],
    4: [
        {"tensor": 2, "activations": "checkpoint", "precision": "bf16-mixed"},
        {"tensor": 2, "grad_sync": "last"},
        {"pipeline": 2, "activations": "checkpoint"},
    ],
}


def steps(rank: Rank, sharding: str, fields: dict[str, Any]) -> dict[str, Any]:
    accum = 1 if fields.get("optimizer_step") == "backward" else 2
    chosen = recipe(sharding, micro=2, accumulation=accum, **fields)
    samples = chosen.micro_batch_size * accum * rank.world // (chosen.tensor * chosen.pipeline)
    asked = job(
        task="launcher.tasks.llama:LanguageModel",
        args=ARGS,
        batch={"global": samples},
        train={"clip_norm": None},
    )
    trainer = Trainer(Rank(**{**vars(rank), "recipe": chosen, "job": asked}), Where(), Unlimited())
    losses = [trainer.train_step(number).loss for number in (1, 2)]
    weights = [p.detach() for p in trainer.model.parameters()]
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in weights]
    return {
        "weights": torch.cat([p.flatten().float() for p in whole]),
        "losses": losses,
        "names": list(trainer.model.state_dict()),
        "units": sum(isinstance(module, FSDPModule) for module in trainer.model.modules()),
    }


def main(out: Path) -> None:
    rank = this_rank(this_place())
    join_ranks(rank)
    found = {}
    for fields in first_cases(CASES[rank.world], 3):
        layers, blocks = steps(rank, "fsdp-layers", fields), steps(rank, "fsdp", fields)
        found[" ".join(map(str, fields.values()))] = {
            "equal": torch.equal(layers.pop("weights"), blocks.pop("weights")),
            "layers": layers,
            "blocks": blocks,
        }
    if rank.first:
        out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

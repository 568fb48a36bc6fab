"""Run on every rank by test_pipeline.py: a few steps of each built-in model, in stages and in one process."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from launcher.rundir.files import replace_json
from launcher.rundir.layout import RunDir
from launcher.train.adapters.nf4 import NF4Linear
from launcher.train.cpu_memory_budget import Unlimited
from launcher.train.error_report import leave
from launcher.train.loop import Trainer
from launcher.train.phase import Where
from launcher.train.rank import Rank, join_ranks, this_place, this_rank
from launcher.train.sharding.sharding import fsdp_roots
from runs import HERE, job, recipe

STEPS, GLOBAL_BATCH = 5, 8
HELD_OUT = 5
"Samples that are evaluated: the last micro-batch is not full."
TASKS: dict[str, dict[str, Any]] = {
    "gpt": {
        "task": "launcher.tasks.gpt:PydocGPT",
        "args": {"layers": 4, "dim": 32, "heads": 2, "context": 16},
    },
    "llama": {
        "task": "launcher.tasks.llama:LanguageModel",
        "args": {"context": 16, "model": {"layers": 5}},
    },
    "video": {"task": "launcher.tasks.video:VideoLanguageModel", "args": {"max_frames": 2, "context": 16}},
    "brain": {"task": "launcher.tasks.brain:BrainAutoencoder", "model": {"batch_norm": True}},
    "transformers": {"task": "launcher.tasks.huggingface:CausalLM"},
    "conditioned": {"task": "conditioned:Conditioned"},
    "forces": {"task": "conditioned:Conditioned", "args": {"forces": True}},
    "in place": {"task": "conditioned:Conditioned", "args": {"in_place": True}},
}
LORA: dict[str, Any] = {"kind": "lora", "rank": 4}
TASKS |= {
    "lora": {**TASKS["llama"], "adapter": LORA},
    "gpt lora": {**TASKS["gpt"], "adapter": LORA},
    "lora of transformers": {**TASKS["transformers"], "adapter": LORA},
    "qlora": {
        **TASKS["llama"],
        "args": {"context": 16, "model": {"layers": 3, "dim": 128, "hidden": 256}},
        "adapter": {**LORA, "kind": "qlora"},
    },
}


def trainer(
    rank: Rank, folder: Path, task: str, recipe_fields: dict[str, Any], clip_norm: float | None = None
) -> Trainer:
    data_ranks = rank.world // recipe_fields.get("pipeline", 1) // recipe_fields.get("tensor", 1)
    made = recipe(
        **{"sharding": "none", "micro": 2, "accumulation": GLOBAL_BATCH // 2 // data_ranks, **recipe_fields}
    )
    about = dict(TASKS[task])
    if "transformers" in task:
        about["args"] = {"path": os.environ["CONFIG"], "context": 16}
    train = {"lr": 1e-3, "clip_norm": clip_norm, "eval_every": STEPS}
    asked = job(**about, batch={"global": GLOBAL_BATCH}, steps=STEPS, train=train)
    run = RunDir(folder / task)
    run.path.mkdir(exist_ok=True)
    changes = {"recipe": made, "job": asked, "run": run, "workdir": str(HERE)}
    return Trainer(Rank(**{**vars(rank), **changes}), Where(), Unlimited())


def steps_of(made: Trainer) -> dict[str, Any]:
    """Losses, norms, the evaluation, and the whole model's parameters after the last step."""
    results = [made.train_step(step) for step in range(1, STEPS + 1)]
    assert made.held_out is not None
    made.held_out.samples = HELD_OUT
    evaluated = made.evaluate()
    for root in fsdp_roots(made.model):
        root.reshard()  # an evaluation leaves what it gathered, in the type of the computation
    packed = {f"{name}.packed" for name, one in made.model.named_modules() if isinstance(one, NF4Linear)}
    own = {  # weights packed in 4 bits are no values to compare
        name.removeprefix("module."): (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in made.model.named_parameters()
        if name not in packed
    }
    everyones: list[Any] = [own] * made.rank.world
    if made.rank.world > 1:
        dist.all_gather_object(everyones, own)
    return {
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results],
        "weights": [result.weight for result in results],
        "evaluated": evaluated["eval_loss"],
        "parameters": {name: value for one in everyones for name, value in one.items()},
        "of each rank": [sorted(one) for one in everyones],
    }


def main(out: Path) -> None:
    """The variable CASES has the arguments of `trainer` by name, as JSON."""
    rank = this_rank(this_place())
    join_ranks(rank)
    cases = json.loads(os.environ["CASES"])
    found = {name: steps_of(trainer(rank, out.parent, **case)) for name, case in cases.items()}
    if rank.first:
        torch.save(found, out.with_suffix(".pt"))
        replace_json(out, str(out.with_suffix(".pt")))
    if rank.world > 1:
        dist.barrier()
    leave(0)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    main(Path(sys.argv[1]))

"""Run on every rank by test_states.py: what each recipe really holds, and what the arithmetic says."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from launcher.memory.states import Ranks, states_of
from launcher.spec.job import Job
from launcher.spec.recipe import Recipe
from launcher.tasks import gpt
from launcher.train.cpu_memory_budget import Unlimited
from launcher.train.error_report import leave
from launcher.train.local_shards import local
from launcher.train.loop import Trainer
from launcher.train.optimizers.offload import HostOptimizer, gradient_of
from launcher.train.optimizers.sharded_states import ShardedStates
from launcher.train.phase import Where
from launcher.train.rank import Rank, join_ranks, this_place, this_rank
from launcher.train.shapes import read_shapes
from launcher.train.sharding.sharding import price_of_last


def storages(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of memory below them, each once: padding included."""
    found = {local(t.detach()).untyped_storage() for t in tensors}
    return sum({storage.data_ptr(): storage.nbytes() for storage in found}.values())


def held(trainer: Trainer) -> dict[str, int]:
    model, optimizer = trainer.model, trainer.optimizer
    recipe = trainer.rank.recipe
    gradients = storages(p.grad for p in model.parameters() if p.grad is not None)
    if recipe.grad_sync == "last" and recipe.grad_accum > 1 and recipe.sharding != "none":
        gradients = price_of_last(model, recipe)[0]  # the gradients are gone here; tests/train measures them
    states = [value for state in optimizer.state.values() for value in state.values()]
    if isinstance(optimizer, ShardedStates):
        optimizer = optimizer.inner
    proxies: list[nn.Parameter] = []
    if isinstance(optimizer, HostOptimizer):
        proxies = [p for group in optimizer.inner.param_groups for p in group["params"]]
        if optimizer.gradients is None:
            gradients += max(local(p).nbytes for p in proxies)
        else:
            of_parameters = (gradient_of(p, optimizer) for p in model.parameters())
            gradients += storages(g for g in of_parameters if g is not None)
    return {
        "parameters": storages(model.parameters()),
        "buffers": storages(model.buffers()),
        "gradients": gradients,
        "states": sum(local(value).nbytes for value in states),
        "copies": sum(local(p).nbytes for p in proxies),
    }


def both(rank: Rank, task: dict[str, Any], recipe: Recipe, nvme: str) -> list[dict[str, int]]:
    """[measured after two steps, computed]"""
    job = Job.model_validate(
        {
            **task,
            "name": "held",
            "batch": {"global": recipe.micro_batch_size * recipe.grad_accum * rank.world},
            "steps": 2,
            "train": {**task.get("train", {}), "nvme_dir": nvme, "checkpoint_every": None},
        }
    )
    trainer = Trainer(Rank(**{**vars(rank), "recipe": recipe, "job": job}), Where(), Unlimited())
    measured, without_gradients = list[dict[str, int]](), list[set[str]]()

    def look(*_: object) -> None:
        measured.append(held(trainer))
        gradients = ((name, gradient_of(p, trainer.optimizer)) for name, p in trainer._parameters)
        without_gradients.append({name for name, gradient in gradients if gradient is None})

    trainer.optimizer.register_step_post_hook(look)
    for step in (1, 2):
        trainer.train_step(step)
    ranks = Ranks(rank.world, rank.per_node, on_gpu=False)
    model = read_shapes(trainer.task, recipe).without_gradients(without_gradients[-1])
    made = states_of(model, recipe, ranks, rank.number)
    computed = made.host.model_dump()
    computed["states"] = computed.pop("optimizer") + made.nvme
    return [measured[-1], computed]


def main(out: Path) -> None:
    rank = this_rank(this_place())
    join_ranks(rank)
    text = gpt.documentation()[:4000]  # each trainer cuts it into samples
    gpt.documentation = lambda: text
    cases = json.loads((out.parent / "cases.json").read_text())
    answers = []
    for case in cases:
        recipe = Recipe.model_validate(case["recipe"])
        answers.append(both(rank, case["task"], recipe, str(out.parent)))
        gc.collect()  # FSDP's modules hold each other in cycles
    (out.parent / f"rank-{rank.number}.json").write_text(json.dumps(answers))
    if rank.first:
        out.write_text("null")
    leave(0)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(Path(sys.argv[1]))

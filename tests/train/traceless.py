"""Run on every rank by test_probe.py: a task whose every part changes when it is used, before and after
probes."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from launcher.rundir.files import replace_json
from launcher.rundir.layout import RunDir
from launcher.spec.fire_drill import parse_drills
from launcher.train import Task
from launcher.train.cpu_memory_budget import MemoryBudget
from launcher.train.drill import Drills
from launcher.train.error_report import leave
from launcher.train.local_shards import local
from launcher.train.loop import Trainer
from launcher.train.phase import Where
from launcher.train.rank import join_ranks, this_place, this_rank
from launcher.train.recovery import fallback
from runs import HERE, job, recipe
from saves import everywhere

CALLS = {"loss": 0}
PLENTY = 2**40


class Samples:
    def __init__(self) -> None:
        self.generator, self.fetched = torch.Generator().manual_seed(1), 0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        self.fetched += 1
        return torch.rand(4, generator=self.generator)


class Traces(Task):
    def __init__(self) -> None:
        self.samples, self.drawn, self.weights = Samples(), numpy.random.default_rng(3), []

    def model(self) -> nn.Module:
        return Tracing()

    def data(self, split: str) -> Samples:
        return self.samples

    def collate(self, samples: list[Any]) -> torch.Tensor:
        self.drawn.random()
        return torch.stack(samples) + torch.rand(1) + random.random() + numpy.random.rand()

    def loss(self, model: nn.Module, batch: torch.Tensor) -> Any:
        CALLS["loss"] += 1
        batch = batch * random.random() + numpy.random.rand()
        self.weights.append(len(batch))
        local(model.teacher.detach()).data.mul_(0.9)  # between the calls it is there as a shard
        os.environ["TRACES_LOSS"] = str(CALLS["loss"])
        return model(batch).square().sum(), len(batch)


class Tracing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3)) for _ in range(2)])
        self.teacher = nn.Parameter(torch.ones(2**19), requires_grad=False)
        self.register_buffer("codes", torch.zeros(2**19))
        self.register_buffer("count", torch.zeros(1))
        self.mean, self.noise, self.calls = torch.zeros(4), random.Random(5), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.mean = 0.9 * self.mean + x.detach().mean(0)
        for tensor in (self.codes, self.count):
            tensor.data.add_(self.noise.random())
        for block in self.blocks:
            x = x + block(x)
        return x


def everything(made: Trainer) -> dict[str, Any]:
    """By name, in a form that can be compared."""
    task: Any = made.task
    model: Any = getattr(made.model, "module", made.model)
    parts = {f"parameter {name}": local(p.detach()).clone() for name, p in model.named_parameters()}
    for p, state in made.optimizer.state.items():
        parts |= {f"state {tuple(p.shape)} {key}": local(value).clone() for key, value in state.items()}
    parts |= {"codes": model.codes.clone(), "count": model.count.clone(), "mean": model.mean.clone()}
    parts |= {"torch": torch.get_rng_state(), "fetching": task.samples.generator.get_state()}
    return {
        **{name: value.tolist() for name, value in parts.items()},
        "random": repr(random.getstate()),
        "numpy": repr(numpy.random.get_state()),
        "task's generator": repr(task.drawn.bit_generator.state),
        "model's generator": repr(model.noise.getstate()),
        "counters": [CALLS["loss"], model.calls, task.samples.fetched],
        "list": list(task.weights),
        "environment": dict(os.environ),
    }


def different(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def main(out: Path) -> None:
    rank = this_rank(this_place())
    join_ranks(rank)
    sharding = "none" if rank.world == 1 else "fsdp"
    asked = job(task="traceless:Traces", batch={"global": 8 * rank.world}, train={"probe": "always"})
    chosen = recipe(sharding, 4, 2)
    fields = {"run": RunDir(out.parent / "ours"), "recipe": chosen, "job": asked, "workdir": str(HERE)}
    if rank.first:
        (out.parent / "ours").mkdir()
    where, fallback.CLIMB_AFTER = Where(), 0
    drill = parse_drills("rank=all,phase=probe,allocation=4", rank.world)
    with MemoryBudget(PLENTY, where, Drills([], where, 4)) as budget:
        made = Trainer(replace(rank, **fields), where, budget)
        current = made.current

        def left_by(call: Callable[[], object]) -> list[list[str]]:
            before = everything(made)
            call()
            return [[*names] for names in everywhere(different(before, everything(made)))]

        found: dict[str, Any] = {}
        made.data.start(1)
        samples = made.data.samples(1, 1)
        found["by the comparison"] = left_by(lambda: current.check_first_step(lambda: samples, lambda: None))
        found["by the probe"] = left_by(current.use_largest)
        before = everything(made)
        made.train_step(1)
        after = everything(made)
        found["changed by a step"] = different(before, after)
        found["all"] = sorted(before.keys() | after.keys())
        assert budget.drills is not None
        budget.drills.coming = list(drill)
        found["by a probe that finds less"] = left_by(current.use_largest)
        assert current.recipe.micro_batch_size < 4, "the drill has struck"
        current.fallback._may_retry = {chosen: 0}
        budget.drills.coming = list(drill)
        found["by a refused climb"] = left_by(lambda: current.climb(2))
        assert current.recipe.micro_batch_size < 4
    if rank.first:
        replace_json(out, found)
    leave(0)


if __name__ == "__main__":
    sys.modules["traceless"] = sys.modules["__main__"]
    main(Path(sys.argv[1]))

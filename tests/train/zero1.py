"""Run on every rank by test_zero1.py: training with sharded states beside DDP, and checkpoints of both."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from launcher.rundir.files import replace_json
from launcher.rundir.layout import RunDir
from launcher.tasks import gpt
from launcher.train import Task
from launcher.train.cpu_memory_budget import Unlimited
from launcher.train.error_report import leave
from launcher.train.local_shards import local
from launcher.train.loop import Trainer
from launcher.train.phase import Where
from launcher.train.rank import Rank, join_ranks, this_place, this_rank
from optimizers import OPTIMIZERS, trainer
from runs import HERE, job, recipe
from saves import different, everywhere

CASES: dict[str, dict[str, Any]] = {
    **{name: {"optimizer": name} for name in OPTIMIZERS},
    "bf16": {"precision": "bf16"},
    "bf16-mixed": {"precision": "bf16-mixed", "optimizer": "adam-mini"},
    "accumulated": {"micro": 1, "accumulation": 4, "grad_sync": "each"},
    "accumulated, last": {"micro": 1, "accumulation": 4, "grad_sync": "last"},
    "on the host": {"offload": "cpu-optimizer"},
    "on NVMe": {"offload": "nvme-optimizer", "optimizer": "lion-8bit"},
}
SHARDINGS = ("ddp", "zero1", "fsdp")
SAVED = {"adamw": "crossing", "adamw-8bit": "aligned", "adam-mini": "aligned"}
"Optimizer -> model. 8-bit states are read by other numbers of ranks if rows are whole blocks."


class Awkward(Task):
    """A large embedding, fewer rows than ranks, rows that do not divide, and memory in other orders. The loss
    replaces the memory of all weights."""

    def model(self) -> nn.Module:
        return Shapes()

    def data(self, split: str) -> Any:
        generator = torch.Generator().manual_seed(0)
        return torch.utils.data.TensorDataset(torch.randint(0, 1001, (64,), generator=generator))

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        (classes,) = batch
        for p in model.parameters():
            p.data = p.data.clamp(-1, 1.4)
        return model(classes).square().sum(), len(classes)


class Shapes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1001, 64)
        self.one_row = nn.Linear(64, 1)
        self.three_rows = nn.Linear(64, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.transposed = nn.Parameter(torch.randn(16, 64).t())
        self.conv = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)

    def forward(self, classes: torch.Tensor) -> torch.Tensor:
        x = self.embedding(classes)
        image = self.conv(x.view(-1, 4, 4, 4)).flatten(1)
        return torch.cat([self.one_row(x), self.three_rows(x), x @ self.transposed, image], 1) * self.scale


def whole(made: Trainer) -> dict[str, torch.Tensor]:
    """Parameters and states of all ranks together."""
    found: dict[str, Any] = {}
    for name, p in made.model.named_parameters():
        name = name.removeprefix("module.")
        found[name] = p.detach()
        found |= {f"{name} {key}": value for key, value in made.optimizer.state[p].items()}
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for name, value in found.items()
    }


def bytes_of_states(made: Trainer) -> int:
    return sum(local(value).nbytes for state in made.optimizer.state.values() for value in state.values())


def beside_ddp(rank: Rank, folder: Path, model: str, **fields: Any) -> dict[str, Any]:
    """Six steps under both."""
    micro, accumulation = fields.pop("micro", 4), fields.pop("accumulation", 1)
    ended, losses, norms, states = [], [], [], []
    for sharding in ("ddp", "zero1"):
        chosen = recipe(sharding, micro, accumulation, **fields)
        asked = job(
            task="launcher.tasks.gpt:PydocGPT" if model != "awkward" else "zero1:Awkward",
            args={"layers": 1, "dim": 256 if model == "aligned" else 72, "context": 16}
            if model != "awkward"
            else {},
            batch={"global": micro * accumulation * rank.world},
            train={"lr": 1e-3, "clip_norm": 0.1, "nvme_dir": str(folder)},
        )
        made = Trainer(
            Rank(**{**vars(rank), "recipe": chosen, "job": asked, "workdir": str(HERE)}),
            Where(),
            Unlimited(),
        )
        steps = [made.train_step(step) for step in range(1, 7)]
        losses.append([step.loss for step in steps])
        norms.append([step.grad_norm for step in steps])
        ended.append({name: p.detach().clone() for name, p in made.model.named_parameters()})
        states.append(bytes_of_states(made))
    distance = max(float((a - b).abs().max()) for a, b in zip(*(e.values() for e in ended), strict=True))
    return {
        "different": everywhere(different(*ended)),
        "distance": distance,
        "losses": losses,
        "norms": norms,
        "states": everywhere(states),
    }


def saved(rank: Rank, folder: Path) -> None:
    """A checkpoint of three steps by each sharding, and what it holds."""
    for optimizer, model in SAVED.items():
        for sharding in SHARDINGS:
            run = RunDir(folder / f"{optimizer} {sharding}")
            made = trainer(rank, optimizer, sharding, model, run=run)
            for step in (1, 2, 3):
                made.train_step(step)
            outcome = made.checkpoints.save(3)
            assert outcome is not None and outcome.problem is None, outcome
            content = whole(made)
            if rank.first:
                torch.save(content, run.path / "whole.pt")


def read(rank: Rank, folder: Path) -> dict[str, list[str]]:
    """Names of the tensors that differ after reading each checkpoint under each sharding."""
    found = {}
    for optimizer, model in SAVED.items():
        for writer in SHARDINGS:
            run = RunDir(folder / f"{optimizer} {writer}")
            theirs = torch.load(run.path / "whole.pt")
            for reader in SHARDINGS if rank.world > 1 else ("none",):
                if rank.world == 2 and writer == reader:
                    continue
                made = trainer(rank, optimizer, reader, model, run=run)
                assert made.checkpoints.restore() == 3
                found[f"{optimizer} {writer} {reader}"] = different(whole(made), theirs)
    return found


def main(folder: Path, out: Path) -> None:
    rank = this_rank(this_place())
    join_ranks(rank)
    text = gpt.documentation()[:20_000]
    gpt.documentation = lambda: text
    result: dict[str, Any] = {}
    if rank.world == 2:
        result["beside"] = {
            name: beside_ddp(rank, folder, "aligned", **dict(fields)) for name, fields in CASES.items()
        }
        result["crossing"] = beside_ddp(rank, folder, "crossing")
        result["awkward"] = {
            name: beside_ddp(rank, folder, "awkward", optimizer=name) for name in ("lion", "adam-mini")
        }
        saved(rank, folder)
    result["read"] = read(rank, folder)
    if rank.first:
        replace_json(out, result)
    leave(0)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    main(Path(sys.argv[1]).parent.parent, Path(sys.argv[1]))

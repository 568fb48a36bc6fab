"""Run on every rank by test_other_shards.py: what a model sees of its parameters while a rank runs alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from launcher.rundir.files import replace_json
from launcher.train.cpu_memory_budget import Unlimited
from launcher.train.error_report import leave
from launcher.train.mesh import meshes
from launcher.train.rank import join_ranks, this_place, this_rank
from launcher.train.recovery.agreement import Agreement
from launcher.train.recovery.collectives import Collectives
from saves import everywhere

LARGE = 2**19
"Elements of a row: 2 MiB in fp32."


class Values(nn.Module):
    """Parameters with fewer rows than ranks, with rows that do not come out even, and large ones of both
    sorts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.scale = nn.Parameter(torch.tensor([0.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.scale.sum()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.three = nn.Parameter(1 + torch.arange(6.0).view(3, 2))
        self.ten = nn.Parameter(1 + torch.arange(20.0).view(10, 2))
        self.few_large = nn.Parameter(torch.full((2, LARGE), 3.0))
        self.uneven_large = nn.Parameter((1 + torch.arange(5.0)).view(5, 1).repeat(1, LARGE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = {name: p.detach().clone() for name, p in self.named_parameters()}
        return x + sum(p.float().mean() for p in self.parameters())


def main(out: Path) -> None:
    rank = this_rank(this_place())
    join_ranks(rank)
    model: Any = Values()
    real = {name: p.detach().clone() for name, p in model.blocks[0].named_parameters()}
    mesh = meshes(rank).data
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=mesh)
    collectives = Collectives(model, rank.device)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)  # what a step has changed
    collectives.others.collect(Agreement(rank, Unlimited()))
    sent = dist.distributed_c10d._get_default_group()._get_sequence_number_for_group()
    with collectives.local():
        loss = model(torch.ones(1, requires_grad=True)).sum()
        loss.backward()
    quiet = dist.distributed_c10d._get_default_group()._get_sequence_number_for_group() == sent
    seen = model.blocks[0].seen
    result = {
        "nothing was sent": quiet,
        "equal": {name: torch.equal(seen[name], 2 * real[name]) for name in real},
        "values": {
            name: sorted({*map(float, seen[name].flatten().tolist())})
            for name in ("few_large", "uneven_large")
        },
        "own part": all(
            torch.equal(p.to_local(), (2 * real[name]).chunk(rank.world)[rank.number])
            for name, p in model.blocks[0].named_parameters()
            if isinstance(p, DTensor) and p.to_local().numel()
        ),
    }
    everyones = everywhere(result)
    if rank.first:
        replace_json(out, everyones)
    dist.barrier()
    leave(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

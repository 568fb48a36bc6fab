"""Run on every rank by test_probe.py."""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from launcher.spec.recipe import Recipe
from launcher.train.budget import MemoryBudget, Unlimited
from launcher.train.data import TrainingData
from launcher.train.failure import leave
from launcher.train.loop import Trainer
from launcher.train.rank import Rank, join_ranks, this_place, this_rank
from launcher.train.recovery.collectives import Collectives
from launcher.train.recovery.probe import Probe
from launcher.train.recovery.undo import Undo
from launcher.train.where import Where
from runs import HERE, job, recipe


def trainer(rank, asked, chosen, budget) -> Trainer:
    return Trainer(
        dataclasses.replace(rank, recipe=chosen, job=asked, workdir=str(HERE)),
        budget.where if isinstance(budget, MemoryBudget) else Where(),
        budget,
    )


def probe_of(made: Trainer):
    collectives = Collectives(made.model, made.rank.device) if isinstance(made.model, FSDPModule) else None
    with made.budget.host_side():
        undo = Undo(made.model, made.rank.device)
    return Probe(
        made.model,
        made.task,
        made.optimizer,
        made.scaler,
        made.rank,
        made.where,
        made.budget,
        undo,
        collectives,
    )


def use(made: Trainer, chosen: Recipe) -> None:
    rank = made.rank = dataclasses.replace(made.rank, recipe=chosen)
    data = made.task.data("train")
    with made.budget.host_side():
        made.data = TrainingData(data, made.task.collate, rank.job, chosen, rank.number, rank.world)
    made.task.loss_chunks = chosen.loss_chunks


def exact(rank, sharding, accumulation, micros=(1, 2, 3, 4), task=None, args=None, train={}, **fields):
    found = []
    for micro in micros:
        chosen = recipe(sharding, micro, accumulation, **fields)
        asked = job(
            task=task or "launcher.tasks.gpt:PydocGPT",
            args=args or {"layers": 2, "dim": 32, "context": 32},
            batch={"global": micro * accumulation * rank.world},
            steps=6,
            train=train,
        )
        with MemoryBudget(2**40, Where()) as budget:
            made = trainer(rank, asked, chosen, budget)
            probe = probe_of(made)
            gc.collect()
            live = budget.live
            budget._earlier_peak = budget._peak = budget.live
            if len(sys.argv) > 2:
                budget.record(True)
            undo, made.probe = probe.undo, probe
            mine = {}
            real_forget = probe._forget_peak
            probe._forget_peak = lambda: mine.update(peak=budget.peak, contents=budget.contents())
            assert probe.fits(chosen)
            gc.collect()
            after = budget.live - live
            budget._earlier_peak = budget._peak = budget.live
            if len(sys.argv) > 2:
                budget.record(True)
            peaks = []
            for step in (1, 2, 3):
                undo.take()
                made.train_step(step)
                peaks.append(budget.take_peak())
            real = budget.contents()
            found.append((micro, mine["peak"], mine["peak"] - max(peaks), peaks, after))
            if len(sys.argv) > 2 and rank.first:
                from collections import Counter

                a = Counter((h.size, str(h.dtype), tuple(h.shape)) for h in mine["contents"])
                b = Counter((h.size, str(h.dtype), tuple(h.shape)) for h in real)
                print("only probe", a - b, "\nonly real", b - a)
        del made, probe, undo
        gc.collect()
    return found


def main(out: Path) -> None:
    rank = this_rank(this_place())
    join_ranks(rank)
    for sharding in (
        ["ddp", "fsdp", "fsdp-keep"]
        if rank.world == 2
        else ["none", "fsdp"]
        if rank.world == 1
        else ["hybrid"]
    ):
        for accumulation, sync in ((1, "each"), (2, "each"), (3, "each"), (2, "last"), (3, "last")):
            r = exact(rank, sharding, accumulation, grad_sync=sync)
            if rank.first:
                print(sharding, accumulation, sync, *r, sep="\n   ", flush=True)
    if rank.first:
        out.write_text("{}")
    dist.barrier()
    leave(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

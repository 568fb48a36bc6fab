"""Run on every rank by test_probe.py: probes without a trace, and their answers beside real steps."""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from launcher.spec.job import Job
from launcher.spec.recipe import SHARDED, Recipe
from launcher.tasks import gpt
from launcher.train.cpu_memory_budget import Budget, MemoryBudget, Unlimited
from launcher.train.error_report import leave
from launcher.train.local_shards import local
from launcher.train.loop import Trainer
from launcher.train.phase import Where
from launcher.train.rank import Rank, join_ranks, this_place, this_rank
from runs import HERE, job, recipe

PLENTY = 2**40
GLOO = 32 * 1024
"As in test_probe.py."


def trainer(rank: Rank, asked: Job, chosen: Recipe, budget: Budget | None = None) -> Trainer:
    alone = {"world": 1, "per_node": 1, "number": 0} if chosen.sharding == "none" else {}
    changed = replace(rank, job=asked, recipe=chosen, workdir=str(HERE), **alone)
    where = budget.where if isinstance(budget, MemoryBudget) else Where()
    made = Trainer(changed, where, budget or Unlimited())
    if chosen.sharding == "none":
        torch.manual_seed(rank.number)
    return made


def lower(chosen: Recipe, micro: int) -> Recipe:
    accumulation = chosen.micro_batch_size * chosen.grad_accum // micro
    return chosen.model_copy(update={"micro_batch_size": micro, "grad_accum": accumulation})


def bits(made: Trainer) -> dict[str, torch.Tensor]:
    """Parameters, states, buffers, gradients and random state."""
    found = {f"buffer {name}": value for name, value in made.model.named_buffers()}
    for name, p in made.model.named_parameters():
        found[name] = local(p.detach())
        found |= {f"{name} {key}": local(value) for key, value in made.optimizer.state.get(p, {}).items()}
        if p.grad is not None:
            found[f"gradient {name}"] = local(p.grad)
    return {name: value.clone() for name, value in {**found, "rng": torch.get_rng_state()}.items()}


def different(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    return [
        name
        for name in one.keys() | other.keys()
        if name not in one or name not in other or not torch.equal(one[name], other[name])
    ]


UNTOUCHED = [
    ("none", "lion-8bit", "none"),
    ("ddp", "adamw-8bit", "none"),
    ("fsdp", "adamw", "none"),
    ("fsdp-keep", "adam-mini", "none"),
    ("fsdp", "adamw-bf16", "cpu"),
    ("fsdp", "lion", "cpu-optimizer"),
    ("ddp", "adamw", "nvme-optimizer"),
    ("zero1", "adamw-bf16", "none"),
]


def untouched(rank: Rank, folder: Path, sharding: str, optimizer: str, offload: str) -> dict[str, Any]:
    """What differs behind a probe, and after steps with probes before and between."""
    asked = job(task="changing:ChangingTask", args={"dim": 64}, train={"nvme_dir": str(folder)})
    chosen = recipe(sharding, 4 if sharding == "none" else 2, 2, optimizer=optimizer, offload=offload)

    def run(probed: bool) -> tuple[list[float], dict[str, torch.Tensor], list[str]]:
        losses, traces = [], list[str]()
        with MemoryBudget(PLENTY) as budget:
            made = trainer(rank, asked, chosen, budget)
            probe = made.current.probe
            for step in (1, 2, 3):
                if probed:
                    before = bits(made)
                    assert probe.fits(chosen)
                    budget.limit = budget.live + 20_000
                    refused = probe.largest([chosen, chosen]) is None
                    budget.limit = PLENTY
                    assert refused
                    traces += different(before, bits(made))
                probe.undo.take()
                losses.append(made.train_step(step).loss)
        return losses, bits(made), traces

    (losses, after, traces), (plain, untouched_, _) = run(True), run(False)
    return {"losses": [losses, plain], "different": different(after, untouched_), "traces": sorted({*traces})}


Case = tuple[str, int, str, dict[str, Any], dict[str, Any]]
EXACT: list[Case] = [
    ("none", 2, "each", {"precision": "bf16-mixed"}, {}),
    ("ddp", 1, "each", {"offload": "cpu-optimizer"}, {}),
    ("ddp", 2, "each", {"optimizer": "adamw-8bit"}, {"find_unused_parameters": True}),
    ("ddp", 2, "each", {"optimizer": "lion-8bit"}, {}),
    ("ddp", 3, "last", {}, {}),
    ("zero1", 2, "each", {"optimizer": "adam-mini"}, {}),
    ("fsdp", 1, "each", {"optimizer": "adam-mini"}, {}),
    ("fsdp", 2, "each", {"activations": "checkpoint", "loss_chunks": 3, "offload": "cpu"}, {}),
    ("fsdp", 3, "last", {"precision": "fp16-mixed", "grad_scaler": True}, {}),
    ("fsdp-keep", 2, "each", {}, {}),
    ("fsdp-layers", 2, "each", {"activations": "checkpoint"}, {}),
]
HYBRID: list[Case] = [("hybrid", 2, "each", {}, {}), ("hybrid", 3, "last", {}, {})]
MICROS = (2, 1)


def exact(
    rank: Rank, sharding: str, accumulation: int, sync: str, fields: dict[str, Any], train: dict[str, Any]
) -> dict[str, Any]:
    """Peaks of three steps of each micro-batch, and the probe's answers under budgets around them."""
    chosen = [recipe(sharding, micro, accumulation, grad_sync=sync, **fields) for micro in MICROS]

    def asked(one: Recipe) -> Job:
        ranks = 1 if sharding == "none" else rank.world
        return job(
            task="launcher.tasks.gpt:PydocGPT",
            args={"layers": 1, "dim": 32, "context": 32},
            batch={"global": one.micro_batch_size * accumulation * ranks},
            train=train,
        )

    # What gloo's threads still hold only adds to a peak: the least of a few runs is the step's own.
    runs = 1 if sharding == "none" else 3
    peaks = [
        [min(same) for same in zip(*(_peaks(rank, asked(one), one) for _ in range(runs)), strict=True)]
        for one in chosen
    ]
    answers, live = [], []
    with MemoryBudget(PLENTY) as budget:
        made = trainer(rank, asked(chosen[0]), chosen[0], budget)
        probe = made.current.probe
        gc.collect()
        before = budget.live
        slack = GLOO if sharding in SHARDED else 1
        for limit in sorted({edge for steps in peaks for edge in (max(steps) - slack, max(steps))}):
            budget.limit = limit
            answers.append([limit, probe.largest(chosen)])
            gc.collect()
            live.append(budget.live - before)
    return {"peaks": peaks, "answers": answers, "live": live}


def _peaks(rank: Rank, asked: Job, chosen: Recipe) -> list[int]:
    with MemoryBudget(PLENTY) as budget:
        made = trainer(rank, asked, chosen, budget)
        peaks = []
        for step in (1, 2, 3):
            budget.take_peak()
            made.train_step(step)
            # The recorder reads the counters before the update of the second step, too.
            reading, _ = made.recorder.parts.after_step(made.recorder.memory.meter.read(), evaluated=False)
            assert reading.peak is not None
            peaks.append(reading.peak)
    return peaks


def really(rank: Rank) -> dict[str, Any]:
    """On one device, with a budget from the beginning to the end: what the probe says, and what then runs."""
    chosen = recipe("none", 8, 1)
    rungs = [lower(chosen, micro) for micro in (8, 4, 2, 1)]
    found: dict[str, Any] = {}
    for limit in range(900_000, 2_400_001, 300_000):
        with _limited(rank, chosen, limit) as made:
            index = made.current.probe.largest(rungs)
        runs = []
        for one in rungs[max(0, (index or 0) - 1) :][:2] if index is not None else rungs[-1:]:
            with _limited(rank, one, limit) as made:
                runs.append([one.micro_batch_size, _steps_until_full(made)])
        found[str(limit)] = [index, runs]
    return found


@contextmanager
def _limited(rank: Rank, chosen: Recipe, limit: int) -> Iterator[Trainer]:
    asked = job(task="launcher.tasks.gpt:PydocGPT", args={"layers": 2, "dim": 32, "context": 32})
    gc.collect()
    with MemoryBudget(limit) as budget:
        yield trainer(rank, asked, chosen, budget)


def _steps_until_full(made: Trainer) -> int:
    """How many of three steps are complete."""
    made.recovery.why_not = "this is about the failure"
    for step in (1, 2, 3):
        try:
            made.train_step(step)
        except torch.OutOfMemoryError:
            return step - 1
    return 3


def alone(rank: Rank, folder: Path) -> dict[str, Any]:
    """Rank 0 probes while rank 1 waits for a file that rank 0 writes when it is done."""
    done = folder / "done"
    probes = {
        sharding: trainer(rank, job(task="changing:ChangingTask"), recipe(sharding, 2, 2)).current.probe
        for sharding in ("ddp", "zero1", "fsdp", "fsdp-keep")
    }
    dist.barrier()
    found = {}
    if rank.first:
        found = {name: probe.fits(probe.rank.recipe) for name, probe in probes.items()}
        done.write_text("")
    deadline = time.monotonic() + 240
    while not done.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    for name, fields in {"gathering": {}, "gathering, compiled": {"compile": True}}.items():
        made = trainer(rank, job(task="changing:Gathering"), recipe("ddp", 4, 1, **fields))
        probe = made.current.probe
        if rank.first:
            found[name] = [probe.largest([probe.rank.recipe, lower(probe.rank.recipe, 2)]), probe.off]
    dist.barrier()
    synced = trainer(rank, job(task="changing:Synced"), recipe("fsdp", 4, 1)).recovery.why_not
    return {"found": found, "in time": done.exists(), "synced": synced}


def timed(rank: Rank) -> dict[str, list[float]]:
    """Seconds of a step and of a confirmation, each the best of some."""
    found = {}
    for sharding in ("none", "ddp", "fsdp"):
        asked = job(task="launcher.tasks.gpt:PydocGPT", args={"layers": 4, "dim": 128, "context": 64})
        made = trainer(rank, asked, recipe(sharding, 8 if sharding == "none" else 4, 1))
        probe = made.current.probe
        seconds: list[list[float]] = [[], []]
        for step in (1, 2, 3, 4):
            dist.barrier()
            times = [time.perf_counter()]
            made.train_step(step)
            times.append(time.perf_counter())
            probe.fits(made.rank.recipe)
            times.append(time.perf_counter())
            seconds[0].append(times[1] - times[0])
            seconds[1].append(times[2] - times[1])
        found[sharding] = [min(kind) for kind in seconds]
    return found


def main(out: Path) -> None:
    rank = this_rank(this_place())
    join_ranks(rank)
    text = gpt.documentation()[:20_000]
    gpt.documentation = lambda: text
    gc.collect()
    gc.freeze()  # the modules: a probe that fails collects garbage
    result: dict[str, Any] = {}
    if rank.world == 2:
        result["untouched"] = {" ".join(case): untouched(rank, out.parent, *case) for case in UNTOUCHED}
        result["alone"] = alone(rank, out.parent)
        result["timed"] = timed(rank)
        result["really"] = really(rank) if rank.first else {}
    cases = HYBRID if rank.world == 4 else EXACT
    result["exact"] = {" ".join(map(str, case)): exact(rank, *case) for case in cases}
    out.with_name(f"rank {rank.number}.json").write_text(json.dumps(result))
    if rank.first:
        out.write_text("{}")
    dist.barrier()
    leave(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""The autoencoder's step with tensor parallelism and with FSDP, on the same CPU ranks, which take turns.

    python benchmarks/tensor.py [--ranks 4] [--steps 10]

One matrix has most of the parameters. FSDP gathers it for each micro-batch, and reduces a gradient of its
size; with tensor parallelism, ranks exchange its inputs and outputs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from launcher.rundir.layout import RunDir  # noqa: E402
from launcher.tasks.brain import BrainAutoencoder, Shape  # noqa: E402
from launcher.train.cpu_memory_budget import Unlimited  # noqa: E402
from launcher.train.error_report import leave  # noqa: E402
from launcher.train.loop import Trainer  # noqa: E402
from launcher.train.phase import Where  # noqa: E402
from launcher.train.rank import Rank, join_ranks, this_place, this_rank  # noqa: E402
from tests.train.runs import job, measure, recipe  # noqa: E402

BATCH = 32
ACCUMULATION = (1, 4)
SHAPE = Shape(8, 64, 64, (8, 16), 16, 16, (16, 16), 64, 64, (512, 256, 512), 4000)
"The giant matrix has 17 million of 20 million parameters; in the shape 8b, 6.7 of 8.4 billion."


class Autoencoder(BrainAutoencoder):
    def __init__(self) -> None:
        super().__init__()
        self.shape = SHAPE


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    env = {"BENCHMARK_STEPS": str(options.steps)}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        found = measure(str(Path(__file__).resolve()), Path(folder), options.ranks, env=env)
    report = {
        "machine": f"{os.cpu_count()} cores, {options.ranks} ranks over gloo",
        "torch": torch.__version__,
        "parameters": {"all": found.pop("parameters"), "matrix": SHAPE.features * SHAPE.layers[0]},
        "batch": BATCH,
        "steps": options.steps,
        "seconds per step, median (fastest)": {
            name: f"{statistics.median(times):.3f} ({min(times):.3f})" for name, times in found.items()
        },
    }
    print(json.dumps(report, indent=2))
    for accumulation in ACCUMULATION:
        pairs = zip(found[f"fsdp, {accumulation}"], found[f"tensor, {accumulation}"], strict=True)
        ratios = [fsdp / tensor for fsdp, tensor in pairs]
        print(
            f"micro-batches per step: {accumulation}: tensor parallelism is {statistics.median(ratios):.1f} "
            f"times as fast as FSDP (pairs: {min(ratios):.1f} to {max(ratios):.1f})"
        )
    return 0


def as_rank(out: Path) -> None:
    rank = this_rank(this_place())
    join_ranks(rank)
    trainers: dict[str, Any] = {}
    for accumulation in ACCUMULATION:
        for name, fields in (
            ("fsdp", {"sharding": "fsdp"}),
            ("tensor", {"sharding": "none", "tensor": rank.world}),
        ):
            trainers[f"{name}, {accumulation}"] = trainer(rank, accumulation, **fields)
    found: dict[str, list[float]] = {name: [] for name in trainers}
    for step in range(1, int(os.environ["BENCHMARK_STEPS"]) + 2):
        for name, made in trainers.items():
            dist.barrier()
            began = time.perf_counter()
            made.train_step(step)
            dist.barrier()
            if step > 1:  # the first step creates states and groups
                found[name].append(time.perf_counter() - began)
    if rank.first:
        parameters = sum(p.numel() for p in trainers["fsdp, 1"].model.parameters())
        out.write_text(json.dumps({"parameters": parameters, **found}))
    leave(0)


def trainer(rank: Rank, accumulation: int, **fields: Any) -> Trainer:
    data = rank.world // fields.get("tensor", 1)
    asked = job(
        task="tensor:Autoencoder",
        batch={"global": BATCH},
        model={"batch_norm": True},
        train={"lr": 1e-3, "checkpoint_every": None},
    )
    chosen = recipe(micro=BATCH // data // accumulation, accumulation=accumulation, **fields)
    changes = {
        "run": RunDir(rank.run.path),
        "recipe": chosen,
        "job": asked,
        "workdir": str(Path(__file__).parent),
    }
    return Trainer(Rank(**{**vars(rank), **changes}), Where(), Unlimited())


if __name__ == "__main__":
    if "BENCHMARK_STEPS" in os.environ:
        as_rank(Path(sys.argv[1]))
    sys.exit(main())

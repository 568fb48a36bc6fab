"""Tensor and pipeline parallelism against sharding alone: plans of the field reports' models, side by side.

Nothing runs on a GPU: memory and time are the estimate of `launcher plan`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from memory_tables import between, markdown  # noqa: E402

from launcher.api.given_job import as_given_job  # noqa: E402
from launcher.api.model_sources import traces_dir  # noqa: E402
from launcher.api.plan_comparisons import Comparer  # noqa: E402
from launcher.api.prepare import named_cluster, with_hardware  # noqa: E402
from launcher.planning.fastest_recipe import Candidate  # noqa: E402
from launcher.report.content import seconds  # noqa: E402
from launcher.report.terminal import recipe_line  # noqa: E402
from launcher.spec.quantities import GIB  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "parallel.json"


class Case(NamedTuple):
    """A recipe for one model on one cluster. Fields that it leaves open are chosen, if they can be."""

    model: str
    name: str
    example: str
    cluster: str
    recipe: str
    sets: tuple[str, ...] = ()
    beyond: Mapping[str, Any] = {}
    "Fields of a recipe that is only estimated, because the entrypoint does not run it."


BRAIN = "8.36B autoencoder, 8x A6000"
REPORT = "13.14B, 2x A5000"
HUGE = "405B, 128x H100"
LARGE = "70B, 8x H100"
BATCH_2 = ("batch.global=2", "train.clip_norm=null", "resources.memory_per_node=null")
CASES = (
    Case(BRAIN, "FSDP, the best recipe", "brain-8b.yaml", "tensor01", "precision: bf16-mixed, tensor: 1"),
    Case(BRAIN, "tensor 8", "brain-8b.yaml", "tensor01", "precision: bf16-mixed, tensor: 8"),
    Case(REPORT, "split by layers, nothing offloaded", "llama-13b.yaml", "runpod-2xa5000",
         "precision: bf16, optimizer: paged-adamw-8bit, pipeline: 2, stages: [29, 28], offload: none, "
         "activations: checkpoint, loss_chunks: 8, micro_batch_size: 1", BATCH_2),
    Case(REPORT, "split by layers, what fits", "llama-13b.yaml", "runpod-2xa5000",
         "precision: bf16, pipeline: 2, stages: [29, 28], loss_chunks: 8", BATCH_2),
    Case(REPORT, "FSDP, step in backward", "llama-13b.yaml", "runpod-2xa5000",
         "precision: bf16, optimizer_step: backward, tensor: 1, loss_chunks: 8", BATCH_2),
    Case(LARGE, "FSDP, the best recipe", "llama-70b.yaml", "runpod-8xh100", "precision: bf16, tensor: 1"),
    Case(LARGE, "tensor 2", "llama-70b.yaml", "runpod-8xh100", "precision: bf16, tensor: 2"),
    Case(LARGE, "tensor 8", "llama-70b.yaml", "runpod-8xh100", "precision: bf16, tensor: 8"),
    Case(HUGE, "FSDP and tensor 2", "llama-405b.yaml", "slurm-h100",
         "precision: bf16, optimizer: adamw-8bit, sharding: fsdp, activations: checkpoint, loss_chunks: 8"),
    Case(HUGE, "tensor 8 x pipeline 4", "llama-405b.yaml", "slurm-h100",
         "optimizer: adamw, sharding: zero1, optimizer_step: after, "
         "activations: checkpoint, loss_chunks: 8, offload: none",
         beyond={"precision": "float8", "tensor": 8, "pipeline": 4, "micro_batch_size": 1, "grad_accum": 64}),
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--save", action="store_true", help="write results/parallel.* and docs/parallel.md")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose model has this text")
    options = parser.parse_args()
    rows = []
    for case in CASES:
        if options.only in case.model:
            rows.append(row(case))
            print(json.dumps(rows[-1]), flush=True)
    memory, seconds_of_steps = tables(rows)
    print(memory, seconds_of_steps, sep="\n\n")
    if options.save:
        result = {"command": "python benchmarks/parallel.py --save", "rows": rows}
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
        between(ROOT / "docs" / "parallel.md", "benchmarks/parallel.py", memory)
        between(RESULTS.with_suffix(".md"), "benchmarks/parallel.py", seconds_of_steps)
    return 0


def row(case: Case) -> dict[str, Any]:
    """Return the figures of the recipe that fits, or of the nearest one, in bytes and seconds."""
    source, sets = as_given_job(ROOT / "examples" / case.example), (f"recipe={{{case.recipe}}}", *case.sets)
    place = with_hardware(named_cluster(case.cluster, sets), source.job(sets))
    decider = Comparer(source, sets, place, traces_dir()).decider()
    if case.beyond:
        found = decider.evaluate.confirm(decider.plan.recipe.model_copy(update=case.beyond))
        fits = decider.capacity.misfit(found.estimate) is None
    else:
        choice = decider.best()
        found = choice.chosen or nearest(decider.evaluate.confirm(decider.plan.recipe), choice.losers)
        fits = choice.chosen is not None
    return {
        "model": case.model,
        "recipe": case.name,
        "as chosen": recipe_line(found.recipe),
        "fits": fits,
        "needed": found.estimate.needed,
        "host per node": found.estimate.host_per_node,
        "parts": found.estimate.worst.parts,
        "time": found.time.model_dump() if found.time is not None else None,
        "step": found.time.total if found.time is not None else None,
        "samples per second": found.speed,
    }


def nearest(one: Candidate, losers: Any) -> Candidate:
    """Return the candidate that needs least memory."""
    tried = [loser.candidate for loser in losers if loser.candidate is not None]
    return min([one, *tried], key=lambda each: each.estimate.needed)


def tables(rows: list[dict[str, Any]]) -> tuple[str, str]:
    """Return a table of memory and speed, and one of the seconds of a step."""
    memory, budget = [], []
    for one in rows:
        fits = "" if one["fits"] else ", **does not fit**"
        memory.append(
            {
                "model": one["model"],
                "recipe": f"{one['recipe']}: {one['as chosen']}",
                "batch": one["time"]["samples"] if one["time"] is not None else "-",
                "GPU": f"{one['needed'] / GIB:.1f} GiB{fits}",
                "host of a node": f"{one['host per node'] / GIB:.0f} GiB",
                "samples/s": f"{one['samples per second']:.3g}",
            }
        )
        time = one["time"]
        if time is not None:
            budget.append(
                {
                    "model": one["model"],
                    "recipe": one["recipe"],
                    "step": seconds(one["step"]),
                    "samples": time["samples"],
                    "matrix products": seconds(time["compute"]),
                    "other kernels": seconds(time["memory"]),
                    "waiting for links": seconds(time["exposed"]),
                    "of these in tensor groups": seconds(time["tensor"]),
                    "bubble": seconds(time["bubble"]),
                    "offload": seconds(time["offload"]),
                    "optimizer": seconds(time["optimizer"]),
                }
            )
    return markdown(memory), markdown(budget)


if __name__ == "__main__":
    sys.exit(main())

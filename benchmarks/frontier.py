"""What fits where: for each model and cluster the fastest recipe that fits, and the least memory of all.

Nothing runs on a GPU: these are plans, as `launcher plan` makes them. The least memory is found by branch and
bound over the planner's own space.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from memory_tables import between, budget, filled, markdown  # noqa: E402

from launcher.api.given_job import as_given_job  # noqa: E402
from launcher.api.model_sources import traces_dir  # noqa: E402
from launcher.api.plan_comparisons import Comparer  # noqa: E402
from launcher.api.prepare import named_cluster, with_hardware  # noqa: E402
from launcher.planning.fastest_recipe import Candidate, Capacity  # noqa: E402
from launcher.spec.errors import LauncherError  # noqa: E402
from launcher.spec.job import Job  # noqa: E402
from launcher.spec.quantities import GIB  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "frontier.json"
AUTO = ("recipe=auto", "recipe.tensor=1", "train.clip_norm=null")


class Case(NamedTuple):
    """One model on one cluster."""

    title: str
    example: str
    "File below examples/."
    cluster: str
    sets: tuple[str, ...] = AUTO
    gpu: str | None = None
    "GPU in place of the cluster's own."


PUBLISHED = json.loads((ROOT / "benchmarks" / "memory_published.json").read_text())
LLAMA_8B = json.dumps({**PUBLISHED["shapes"]["llama3-8b"], "context": 2048})
FULL = (*AUTO, "recipe.precision=bf16", "resources.gpus_per_node=1")
CASES = (
    Case("8B, all parameters, 2 x 2048 tokens, 1x RTX 4090 24 GB", "llama-7b.yaml", "runpod-a6000",
         (*FULL, f"args={LLAMA_8B}", "batch.global=2"), "RTX 4090"),
    Case("the same with embedding_states: 8-bit", "llama-7b.yaml", "runpod-a6000",
         (*FULL, f"args={LLAMA_8B}", "batch.global=2", "recipe.optimizer=paged-adamw-8bit",
          "recipe.embedding_states=8-bit"), "RTX 4090"),
    Case("13.14B, all parameters, 2048 tokens, 2x A5000 24 GB", "llama-13b.yaml", "runpod-2xa5000",
         (*AUTO, "recipe.precision=bf16", "resources.memory_per_node=null")),
    Case("the same with a global batch of 2", "llama-13b.yaml", "runpod-2xa5000",
         (*AUTO, "recipe.precision=bf16", "resources.memory_per_node=null", "batch.global=2")),
    Case("8.36B autoencoder, 8x A6000 48 GB", "brain-8b.yaml", "tensor01",
         (*AUTO, "recipe.precision=bf16-mixed")),
    Case("70B, all parameters, 4096 tokens, 8x H100 80 GB", "llama-70b.yaml", "slurm-h100",
         (*AUTO, "recipe.precision=bf16", "resources.nodes=1")),
    Case("405B, all parameters, 2048 tokens, 128x H100 80 GB", "llama-405b.yaml", "slurm-h100",
         (*AUTO, "recipe.precision=bf16")),
    Case("the same with sharding: fsdp-layers", "llama-405b.yaml", "slurm-h100",
         (*AUTO, "recipe.precision=bf16", "recipe.sharding=fsdp-layers")),
    *(Case(f"2B video and language, {what}, 1x {gpu} {size} GB", "video-2b.yaml", "runpod-a6000",
           (*AUTO, *sets, "batch.global=8"), gpu)
      for gpu, size in (("RTX 3070", 8), ("RTX 4080", 16), ("RTX 4090", 24))
      for what, sets in (("all parameters", ()), ("QLoRA", ("adapter={kind: qlora, rank: 16}",)))),
    Case("70B QLoRA, 512 tokens, 1x A6000 48 GB", "llama-70b-qlora.yaml", "runpod-a6000", ("recipe=auto",)),
    Case("70B QLoRA, 512 tokens, 2x A5000 24 GB", "llama-70b-qlora.yaml", "runpod-2xa5000", ("recipe=auto",)),
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--save", action="store_true", help="write results/frontier.* and docs/frontier.md")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose title has this text")
    options = parser.parse_args()
    rows, terms = [], []
    for case in CASES:
        if options.only in case.title:
            begun = time.monotonic()
            found, of_fastest = row(case)
            rows.append(found)
            terms.append({"work": case.title, **of_fastest})
            print(json.dumps({**found, "seconds": round(time.monotonic() - begun)}), flush=True)
    terms = filled(terms)
    print(markdown(rows), markdown(terms), sep="\n\n")
    if options.save:
        result = {"command": "python benchmarks/frontier.py --save", "rows": rows, "budgets": terms}
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
        between(ROOT / "docs" / "frontier.md", "benchmarks/frontier.py", markdown(rows))
        between(RESULTS.with_suffix(".md"), "benchmarks/frontier.py", markdown(terms))
    return 0


def row(case: Case) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the row of a case, and the terms of the fastest recipe's estimate in GiB."""
    comparer = comparer_of(case)
    decider = comparer.decider()
    room = decider.capacity
    try:
        chosen = decider.decide().chosen
        fastest, speed, terms = _told(chosen, room), f"{chosen.speed:.3g}", budget(chosen.estimate)
    except LauncherError:
        fastest, speed, terms = "nothing fits", "-", {}
    found = {
        "work": case.title,
        "the fastest that fits": fastest,
        "samples/s": speed,
        "least without offload": _told(least(comparer, offloads=False), room),
        "least of all": _told(least(comparer, offloads=True), room),
    }
    return found, terms


def least(comparer: Comparer, *, offloads: bool) -> Candidate | None:
    """Return the recipe that needs least GPU memory, confirmed by a complete trace.

    Each recipe has up to three figures: a bound, an estimate from traces of others, and that of its own
    trace. The recipe with the smallest figure is examined next, until that is one of its own trace.
    """
    decider = comparer.decider()
    evaluate = decider.evaluate
    smallest = dict.fromkeys(decider.space().sizes(rest)[0] for rest in decider.space().combinations)
    kinds = [evaluate.roughly, evaluate, evaluate.confirm]
    asked = [one for one in smallest if offloads or not one.offloads]
    heap = [(evaluate.roughly(one).estimate.needed, 0, place) for place, one in enumerate(asked)]
    heapq.heapify(heap)
    while heap:
        _, kind, place = heapq.heappop(heap)
        if kind == 2:
            return evaluate.confirm(asked[place])
        found = kinds[kind + 1](asked[place])
        heapq.heappush(heap, (found.estimate.needed, kind + 1, place))
    return None


def comparer_of(case: Case) -> Comparer:
    source = as_given_job(ROOT / "examples" / case.example)
    wanted: Job = source.job(case.sets)
    comparer = Comparer(
        source,
        case.sets,
        with_hardware(named_cluster(case.cluster, case.sets), wanted),
        traces_dir(),
    )
    if case.gpu is not None:
        [comparer.cluster] = comparer.with_gpus([case.gpu]).values()
    return comparer


def _told(candidate: Candidate | None, room: Capacity) -> str:
    if candidate is None:
        return "-"
    recipe, estimate = candidate.recipe, candidate.estimate
    parts = [recipe.optimizer, recipe.sharding, f"activations {recipe.activations}"]
    parts += [f"offload {recipe.offload}"] if recipe.offload != "none" else []
    parts += ["step in backward"] if recipe.optimizer_step == "backward" else []
    parts += [f"loss in {recipe.loss_chunks}"] if recipe.loss_chunks > 1 else []
    parts += [f"{recipe.micro_batch_size} x {recipe.grad_accum}"]
    host = f"host {estimate.host_per_node / GIB:.0f} GiB"
    fits = "" if room.misfit(estimate) is None else ", does not fit"
    return f"**{estimate.needed / GIB:.1f} GiB{fits}**, {host}: {', '.join(parts)}"


if __name__ == "__main__":
    sys.exit(main())

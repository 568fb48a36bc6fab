"""Which recipes there are, and how far the loss curve of each may be from fp32 on one device."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

from launcher.spec.recipe import Recipe
from launcher.spec.recipe_rules import Setting, broken_rules
from launcher.spec.unsupported_recipes import unsupported

AXES: dict[str, tuple[Any, ...]] = {
    "precision": ("fp32", "bf16", "bf16-mixed", "fp16-mixed"),
    "optimizer": ("adamw", "adamw-bf16", "adamw-8bit", "lion", "lion-8bit", "adam-mini"),
    "sharding": ("none", "ddp", "zero1", "fsdp", "fsdp-keep", "fsdp-layers", "hybrid"),
    "offload": ("none", "cpu", "cpu-optimizer", "nvme-optimizer"),
    "activations": ("keep", "selective", "every-second", "checkpoint", "half", "offload", "compress"),
    "loss_chunks": (1, 3),
    "grad_sync": ("each", "last"),
    "mesh": ("data", "tensor", "pipeline", "zero-bubble"),
}
"torch.compile is left out: a minute of compiling for each recipe says nothing about the others."

MESHES: dict[str, dict[str, Any]] = {
    "data": {},
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2, "schedule": "1f1b"},
    "zero-bubble": {"pipeline": 2, "schedule": "zero-bubble"},
}

ON_GPU = {
    "precision": (*AXES["precision"], "float8"),
    "optimizer": (*AXES["optimizer"], "paged-adamw-8bit"),
}

PLAIN = {
    "precision": "fp32",
    "sharding": "none",
    "offload": "none",
    "activations": "keep",
    "loss_chunks": 1,
    "grad_sync": "each",
}

# The largest relative difference of a loss within 20 steps: three to five times the worst that was measured
# on a CPU (benchmarks/results/recipes.json), more for fp32, where that is one rounding; float8 is unmeasured.
# bf16-mixed: on the text of Python 3.10, one step of Lion differs by 5e-4, in stages by 1e-3.
PRECISION = {"fp32": 2e-6, "bf16-mixed": 2e-3, "fp16-mixed": 2e-4, "bf16": 3e-3, "float8": 2e-2}
OPTIMIZER = {
    "adamw": 0.0,
    "lion": 0.0,
    "adam-mini": 0.0,
    "adamw-bf16": 3e-5,
    "adamw-8bit": 2e-4,
    "lion-8bit": 2e-4,
    "paged-adamw-8bit": 2e-4,
}
ACTIVATIONS = {"compress": 2e-4}
"Of the policies of activations, the one whose gradient is approximate."
REFERENCE = {
    "adamw": "adamw",
    "adamw-bf16": "adamw",
    "adamw-8bit": "adamw",
    "paged-adamw-8bit": "adamw",
    "lion": "lion",
    "lion-8bit": "lion",
    "adam-mini": "adam-mini",
}
"Lion and Adam-mini are other algorithms: their own fp32 curve on one device is the one to follow."


def tolerance(recipe: dict[str, Any]) -> float:
    """Sharding, offload, chunks, exact activations and the time of the synchronisation change nothing."""
    approximate = ACTIVATIONS.get(recipe.get("activations", "keep"), 0.0)
    return PRECISION[recipe["precision"]] + OPTIMIZER[recipe["optimizer"]] + approximate


def setting(ranks: int, *, gpu: bool = False) -> Setting:
    """Four ranks are two nodes of two, so that hybrid has something to replicate over."""
    return Setting(ranks, 2 if ranks == 4 else 1, int(gpu), nvme_dir=True, entrypoint=True)


def recipe(ranks: int, **fields: Any) -> dict[str, Any]:
    half = fields.get("activations") == "half"
    more = {"activations": "checkpoint", "checkpoint_ratio": 0.5} if half else {}
    mesh = MESHES[fields.pop("mesh", "data")]
    micro = 8 // (ranks // 2 if mesh else ranks) // 2
    complete = {**fields, **more, **mesh, "micro_batch_size": micro, "grad_accum": 2}
    complete["grad_scaler"] = fields["precision"] == "fp16-mixed"
    return complete


def valid(ranks: int, *, gpu: bool = False) -> Iterator[dict[str, Any]]:
    """Every recipe that no rule refuses."""
    axes = {**AXES, **(ON_GPU if gpu else {})}
    for values in itertools.product(*axes.values()):
        fields = dict(zip(axes, values, strict=True))
        if ranks == 1 and fields["mesh"] != "data":
            continue
        if ranks == 4 and (fields["sharding"] == "hybrid") != (fields["mesh"] == "data"):
            continue  # the rest is no other than with two
        candidate = recipe(ranks, **fields)
        checked = Recipe.model_validate(candidate)
        if not broken_rules(checked, setting(ranks, gpu=gpu)) and not unsupported(checked):
            yield candidate


def covering(ranks: int, together: int = 2, *, gpu: bool = False) -> list[dict[str, Any]]:
    """Few recipes in which any two (`together`) values that go together are together once or more."""
    left = {json.dumps(candidate, sort_keys=True): candidate for candidate in valid(ranks, gpu=gpu)}
    names = sorted(left)
    random.Random(0).shuffle(names)
    groups = {name: set(itertools.combinations(sorted(left[name].items()), together)) for name in names}
    wanted = set().union(*groups.values())
    chosen = []
    while wanted:
        best = max(names, key=lambda name: len(groups[name] & wanted))
        chosen.append(left[best])
        wanted -= groups[best]
    return chosen

"""Which recipes there are on the CPU, and how far each may be from AdamW in fp32 on one device."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

from launcher.spec.recipe import Recipe
from launcher.spec.rules import Setting, broken_rules
from launcher.spec.supported import unsupported

AXES: dict[str, tuple[Any, ...]] = {
    "precision": ("fp32", "bf16", "bf16-mixed", "fp16-mixed"),
    "optimizer": ("adamw", "adamw-bf16", "adamw-8bit", "lion", "lion-8bit", "adam-mini"),
    "sharding": ("none", "ddp", "fsdp", "fsdp-keep", "hybrid"),
    "offload": ("none", "cpu", "cpu-optimizer", "nvme-optimizer"),
    "activations": ("keep", "selective", "checkpoint", "half", "offload"),
    "loss_chunks": (1, 3),
    "grad_sync": ("each", "last"),
}
"torch.compile is left out: a minute of compiling for each recipe says nothing about the others."

# The largest relative difference of a loss within 20 steps. What each costs is measured (benchmarks/results/
# recipes.json holds every recipe's own figure) and given room of about three.
PRECISION = {"fp32": 2e-5, "bf16-mixed": 4e-3, "fp16-mixed": 1e-3, "bf16": 2e-2}
OPTIMIZER = {
    "adamw": 0.0,
    "lion": 0.0,
    "adam-mini": 0.0,
    "adamw-bf16": 3e-3,
    "adamw-8bit": 4e-3,
    "lion-8bit": 4e-3,
}
REFERENCE = {
    "adamw": "adamw",
    "adamw-bf16": "adamw",
    "adamw-8bit": "adamw",
    "lion": "lion",
    "lion-8bit": "lion",
    "adam-mini": "adam-mini",
}
"Lion and Adam-mini are other algorithms: their own fp32 curve on one device is the one to follow."


def tolerance(recipe: dict[str, Any]) -> float:
    """Sharding, offload, activations, chunks and the time of the synchronisation must change nothing."""
    return PRECISION[recipe["precision"]] + OPTIMIZER[recipe["optimizer"]]


def setting(ranks: int) -> Setting:
    """Four ranks are two nodes of two, so that hybrid has something to replicate over."""
    return Setting(ranks, 2 if ranks == 4 else 1, 0, nvme_dir=True, entrypoint=True)


def recipe(ranks: int, **fields: Any) -> dict[str, Any]:
    half = fields.get("activations") == "half"
    more = {"activations": "checkpoint", "checkpoint_ratio": 0.5} if half else {}
    micro = 8 // ranks // 2
    complete = {**fields, **more, "micro_batch_size": micro, "grad_accum": 2}
    complete["grad_scaler"] = fields["precision"] == "fp16-mixed"
    return complete


def valid(ranks: int) -> Iterator[dict[str, Any]]:
    """Every recipe that no rule refuses."""
    for values in itertools.product(*AXES.values()):
        candidate = recipe(ranks, **dict(zip(AXES, values, strict=True)))
        checked = Recipe.model_validate(candidate)
        if not broken_rules(checked, setting(ranks)) and not unsupported(checked):
            yield candidate


def every_pair(ranks: int) -> list[dict[str, Any]]:
    """Few recipes in which any two values that go together are together at least once."""
    left = list(valid(ranks))
    random.Random(0).shuffle(left)
    wanted = {pair for candidate in left for pair in _pairs(candidate)}
    chosen = []
    while wanted:
        best = max(left, key=lambda candidate: len(_pairs(candidate) & wanted))
        chosen.append(best)
        wanted -= _pairs(best)
    return chosen


def _pairs(candidate: dict[str, Any]) -> set[Any]:
    return set(itertools.combinations(sorted(candidate.items()), 2))

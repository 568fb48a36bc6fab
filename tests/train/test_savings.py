"""The order of savings is true: each recipe trains in memory in which the one before it runs out.

Real steps of a small Llama under a budget that is exact to the byte (launcher.train.cpu_memory_budget).
"""

from __future__ import annotations

import json
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest

from launcher.spec.recipe import Recipe
from tests.train.runs import measure

JOB = {
    "name": "savings",
    "task": "launcher.tasks.llama:LanguageModel",
    "args": {
        "model": {
            "layers": 6, "dim": 192, "heads": 6, "kv_heads": 2, "hidden": 512, "vocabulary": 2048,
        },
        "context": 128,
    },
    "steps": 2,
    "batch": {"global": 16},
    "resources": {"gpus_per_node": 0},
    "retries": {"lower": 0},
    "train": {"clip_norm": None, "checkpoint_every": None},
}  # fmt: skip
PLAIN = {
    "precision": "bf16", "optimizer": "adamw", "sharding": "none", "micro_batch_size": 16, "grad_accum": 1,
}  # fmt: skip
ONE_RANK: dict[str, dict[str, Any]] = {
    "plain": {},
    "selective": {"activations": "selective"},
    "every-second": {"activations": "every-second"},
    "checkpoint": {"activations": "checkpoint"},
    "loss in chunks": {"loss_chunks": 8},
    "8-bit states": {"optimizer": "adamw-8bit"},
    "8-bit states of embeddings": {"embedding_states": "8-bit"},
    "step in backward": {"optimizer_step": "backward"},
    "optimizer on the host": {"offload": "cpu-optimizer", "optimizer": "adamw", "embedding_states": "32-bit",
                              "optimizer_step": "after"},
    "offload to the host": {"offload": "cpu", "sharding": "fsdp"},
    "layers one at a time": {"sharding": "fsdp-layers"},
}  # fmt: skip
"What each recipe changes in the one before it."
TWO_RANKS: dict[str, dict[str, Any]] = {
    "ddp": {"sharding": "ddp", "micro_batch_size": 8},
    "zero1": {"sharding": "zero1"},
    "fsdp-keep": {"sharding": "fsdp-keep"},
    "fsdp": {"sharding": "fsdp"},
    **{name: change for name, change in ONE_RANK.items() if name != "plain"},
}
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1600)]


@pytest.mark.parametrize(("ranks", "changes"), [(1, ONE_RANK), (2, TWO_RANKS)], ids=["one rank", "two ranks"])
def test_each_recipe_trains_where_the_one_before_it_runs_out(
    ranks: int, changes: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    recipes = accumulate(changes.values(), lambda one, more: {**one, **more}, initial=PLAIN)
    cases = [{"job": JOB, "recipe": Recipe.model_validate(one).model_dump()} for one in [*recipes][1:]]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    for measured in measure("savings.py", tmp_path, ranks, timeout=1500):
        found = dict(zip(changes, measured, strict=True))
        peaks = {name: one["peak"] for name, one in found.items()}
        assert all(less < more for more, less in pairwise(peaks.values())), peaks
        for name, one in found.items():
            assert one["exact"] == one["losses"], name
            assert one["a byte less"] is None and one["next"] is None, name

"""The planner gathers the layers of a block one at a time where nothing else fits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from launcher.planning.plan import PlanRefusedError
from launcher.planning.recipe_and_ladder import Decider
from launcher.spec.cluster import Cluster
from launcher.spec.job import Job
from launcher.spec.quantities import GIB
from launcher.train.tracing.task_source import TaskSource

MODEL = {"layers": 2, "dim": 8192, "heads": 64, "kv_heads": 8, "hidden": 28672, "vocabulary": 1000}


def decider(memory: float, fields: Mapping[str, Any] | None = None, **recipe: Any) -> Decider:
    """8 GPUs whose node has no memory to offload to."""
    gpu = {"type": "NVIDIA A100-SXM4-80GB", "count": 8, "memory": int(memory * GIB)}
    node = {"gpu": gpu, "cpus": 64, "memory": "30GiB"}
    job = {
        "name": "large-blocks",
        "task": "launcher.tasks.llama:LanguageModel",
        "args": {"context": 512, "model": MODEL},
        "batch": {"global": 32},
        "steps": 1,
        "recipe": {"precision": "bf16", "optimizer": "adamw", "tensor": 1, **recipe},
    }
    cluster = Cluster.model_validate({"name": "eight", "scheduler": "local", "node": node})
    asked = Job.model_validate({**job, **(fields or {})})
    return Decider(asked, cluster, TaskSource(asked, Path.cwd()))


def test_layers_are_gathered_one_at_a_time_where_nothing_else_fits() -> None:
    found = decider(9).decide()
    assert found.plan.recipe.sharding == "fsdp-layers"
    assert "fsdp-layers because nothing fits without" in found.plan.reason
    assert {rung.recipe.sharding for rung in found.rungs} == {"fsdp-layers"}


@pytest.mark.slow
def test_blocks_are_gathered_as_a_whole_where_they_fit() -> None:
    found = decider(14).decide()
    assert found.plan.recipe.sharding == "fsdp"
    layers = next(rung for rung in found.rungs if rung.recipe.sharding == "fsdp-layers")
    assert layers.saved > GIB and all(not rung.recipe.offloads for rung in found.rungs), (
        "a rung before offload"
    )


def test_a_model_that_uses_weights_of_layers_without_a_call_keeps_its_plan_without_that_rung() -> None:
    task = "tests.planning.unusual_models:UncalledLayers"
    found = decider(80, {"task": task, "args": {}}).decide()
    assert [rung.recipe.sharding for rung in found.rungs] == ["fsdp", "fsdp"]
    [note] = [note for note in found.notes if note.startswith("fsdp-layers is left out")]
    assert "uses a weight outside of its module's forward" in note


@pytest.mark.slow
def test_a_job_with_another_sharding_is_told_that_layers_would_fit() -> None:
    with pytest.raises(PlanRefusedError, match="recipe: fits: sharding: fsdp-layers"):
        decider(9, sharding="fsdp").decide()

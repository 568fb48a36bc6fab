"""`launcher plan --zero`: the stages of ZeRO from the estimate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.planning.declared_params import DeclaredParams
from launcher.planning.recipe_and_ladder import Decider
from launcher.planning.zero_stages import Stages, stages_of
from launcher.report.content import Page, sections
from launcher.report.data import as_data
from launcher.spec.cluster import Cluster
from launcher.spec.job import Job
from launcher.train.tracing.task_source import TaskSource

COUNT = 7_000_000_000
GB = 10**9


def stages(nodes: int = 1, **recipe: Any) -> Stages:
    return found_by(decider(nodes, **recipe))


def found_by(decider: Decider) -> Stages:
    return stages_of(decider, decider.plan.recipe)


def decider(nodes: int = 1, gpus: int = 8, **recipe: Any) -> Decider:
    job = Job.model_validate(
        {
            "name": "seven",
            "command": ["python", "train.py"],
            "batch": {"global": gpus * nodes},
            "plan": {"params": COUNT},
            "recipe": recipe,
            "resources": {"nodes": nodes},
        }
    )
    gpu = {"type": "NVIDIA A100-SXM4-80GB", "count": gpus, "memory": "79.1GiB"}
    cluster = Cluster.model_validate(
        {"name": "eight", "scheduler": "local", "max_nodes": nodes, "node": {"gpu": gpu, "cpus": 64}}
    )
    return Decider(job, cluster, DeclaredParams(COUNT))


def test_seven_billion_parameters_in_16_bit_on_8_gpus_are_the_published_row() -> None:
    """56, 31.5, 19.25 and 7 GB for 2 + 2 + 4 bytes per parameter: 16-bit parameters, gradients and both
    states of Adam. FSDP2 keeps its shard of the parameters beside the gathered ones of stage 2."""
    found = stages(precision="bf16", optimizer="adamw")
    assert found.per_parameter == pytest.approx((2, 2, 4), rel=1e-6)
    in_the_paper = [stage.in_the_paper / GB for stage in found.stages]
    assert in_the_paper == pytest.approx([56, 31.5, 19.25, 7], rel=1e-4)
    shard = 2 * COUNT / 8 / GB
    totals = [stage.total / GB for stage in found.stages]
    assert totals == pytest.approx([56, 31.5, 19.25 + shard, 7], rel=1e-4)


def test_the_paper_s_mixed_precision_is_16_bytes_per_parameter_without_sharding() -> None:
    found = stages(precision="bf16-mixed", optimizer="adamw")
    assert sum(found.per_parameter) == pytest.approx(16)
    none, first, second, third = found.stages
    assert none.total == pytest.approx(16 * COUNT, rel=1e-4) and not none.fits
    assert first.total == pytest.approx((8 + 8 / 8) * COUNT, rel=1e-4)
    assert second.gathered == pytest.approx(2 * COUNT, rel=1e-4)
    assert third.total == pytest.approx(2 * COUNT, rel=1e-4) and third.fits


def test_only_the_sharding_differs_and_nothing_is_offloaded() -> None:
    found = stages(precision="bf16", optimizer="lion", offload="cpu-optimizer", sharding="fsdp")
    recipes = [stage.candidate.recipe for stage in found.stages]
    assert [one.sharding for one in recipes] == ["ddp", "zero1", "fsdp-keep", "fsdp"]
    assert {one.model_copy(update={"sharding": "none"}) for one in recipes} == {
        found.recipe.model_copy(update={"sharding": "none"})
    }
    assert {(one.offload, one.grad_sync, one.optimizer) for one in recipes} == {("none", "each", "lion")}


def test_stages_are_shown_where_no_rank_has_another_part_of_the_model() -> None:
    """Tensor parallelism over all GPUs leaves one rank for the data, too."""
    one = decider(gpus=1, precision="bf16")
    [table, about] = sections(Page(one.job, one.cluster, None, zero=found_by(one)), explain=False)
    assert len({row[1:6] for row in table.rows}) == 1 and "ZeRO-2 is fsdp-keep" in about.lines[-1]
    assert about.lines[0].startswith("all stages hold the same")


def test_states_are_shared_out_over_all_nodes() -> None:
    found = stages(nodes=2, precision="bf16", optimizer="adamw")
    assert found.stages[1].optimizer == pytest.approx(4 * COUNT / 16, rel=1e-4)


def test_a_stage_that_a_rule_refuses_says_so() -> None:
    """bitsandbytes runs on plain parameters of a command, not on FSDP2's."""
    found = stages(precision="bf16", optimizer="adamw-8bit", sharding="ddp")
    assert [stage.why_not is not None for stage in found.stages] == [False, False, True, True]
    assert "DTensor" in str(found.stages[3].why_not)


def test_a_rung_of_the_ladder_has_the_figures_of_the_stage_with_its_recipe() -> None:
    wide = {"layers": 2, "dim": 256, "heads": 4, "kv_heads": 4, "hidden": 512, "vocabulary": 8000}
    recipe = {
        "precision": "bf16",
        "sharding": "fsdp",
        "activations": "keep",
        "loss_chunks": 1,
        "offload": "none",
    }
    job = Job.model_validate(
        {
            "name": "rungs",
            "task": "launcher.tasks.llama:LanguageModel",
            "args": {"context": 1024, "model": wide},
            "batch": {"global": 4},
            "steps": 1,
            "recipe": {**recipe, "optimizer": "adamw", "optimizer_step": "after", "grad_sync": "each"},
        }
    )
    gpu = {"type": "NVIDIA A100-SXM4-80GB", "count": 2, "memory": "79.1GiB"}
    cluster = Cluster.model_validate({"name": "two", "scheduler": "local", "node": {"gpu": gpu}})
    source = TaskSource(job, Path.cwd())
    rungs = Decider(job, cluster, source).decide(confirm_rungs=True).rungs
    assert rungs
    for rung in rungs:
        found = stages_of(Decider(job, cluster, source), rung.recipe).stages
        assert rung.candidate in [stage.candidate for stage in found]


def test_stages_that_fsdp_refuses_the_model_are_not_estimated_and_say_so() -> None:
    job = Job.model_validate(
        {"name": "scaled", "task": "tests.planning.unusual_models:Scaled", "batch": {"global": 4}, "steps": 1}
    )
    gpu = {"type": "NVIDIA A100-SXM4-80GB", "count": 2, "memory": "79.1GiB"}
    cluster = Cluster.model_validate({"name": "two", "scheduler": "local", "node": {"gpu": gpu}})
    page = Page(job, cluster, None, zero=found_by(Decider(job, cluster, TaskSource(job, Path.cwd()))))
    assert page.zero is not None
    assert [stage.fits for stage in page.zero.stages] == [True, True, False, False]
    [table, about] = sections(page, explain=False)
    assert [row[-2:] == ("-", "no") for row in table.rows] == [False, False, True, True]
    assert about.lines[0].startswith("ZeRO-2, ZeRO-3 cannot be used: scale is a parameter without dimensions")
    estimated = ["estimate" in stage for stage in as_data(page)["zero"]["stages"]]
    assert estimated == [True, True, False, False]

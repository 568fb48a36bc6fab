"""The states of the field reports' models, as the reports have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launcher.memory.shapes import ModelShapes, Parameter
from launcher.memory.states import Ranks, shard_of, state_bytes, states_of
from launcher.planning.plan import make_plan, ranks_of
from launcher.render.shipped import clusters_dir
from launcher.spec.load import load_cluster, load_job
from launcher.spec.quantities import GIB
from launcher.spec.recipe import Recipe
from launcher.train.shapes import read_shapes
from launcher.train.task import load_task

ROOT = Path(__file__).parents[2]
GB = 10**9


def of_example(example: str, cluster: str, *sets: str) -> tuple[ModelShapes, Recipe, Ranks]:
    job, profile = load_job(ROOT / f"examples/{example}.yaml", sets), load_cluster(clusters_dir() / cluster)
    assert job.task is not None
    plan = make_plan(job, profile)
    model = read_shapes(load_task(job.task, job.args, str(ROOT)), plan.recipe)
    return model, plan.recipe, ranks_of(plan.layout)


def matrix(rows: int, row: int, precision: str) -> ModelShapes:
    return ModelShapes((Parameter("w", (rows, row), 2 if precision == "bf16" else 4),), 0)


def on(ranks: int, rows: int, row: int, **fields: Any) -> Any:
    recipe = Recipe.model_validate({"micro_batch_size": 1, "grad_accum": 1, **fields})
    model = matrix(rows, row, recipe.precision)
    return states_of(model, recipe, Ranks(ranks, ranks, on_gpu=True)).gpu


def test_a_model_of_8_499_653_234_parameters_needs_what_its_report_says() -> None:
    fp32 = on(1, 8_499_653_234, 1, precision="fp32", optimizer="adamw", sharding="none")
    assert [round(fp32.parameters / GIB, 2), round(fp32.gradients / GIB, 2)] == [31.66, 31.66]
    assert round(fp32.optimizer / GIB, 2) == 63.33
    bf16 = on(1, 8_499_653_234, 1, precision="bf16", optimizer="adamw", sharding="none")
    assert round(bf16.total / GIB, 2) == 63.33
    assert round((bf16.parameters + bf16.gradients + fp32.optimizer) / GIB, 2) == 94.99


def test_13_14_billion_parameters_need_what_their_report_says() -> None:
    """26.28 GB of 8-bit states are two bytes a parameter; their scales are a 64th more."""
    fp32 = on(1, 51_328_125, 256, precision="fp32", optimizer="adamw", sharding="none")
    assert [round(fp32.parameters / GB, 2), round(fp32.optimizer / GB, 2)] == [52.56, 105.12]
    eight = on(1, 51_328_125, 256, precision="fp32", optimizer="adamw-8bit", sharding="none")
    assert round(eight.optimizer / (1 + 4 / 256) / GB, 2) == 26.28


def test_7_billion_parameters_in_bf16_on_eight_gpus_need_56_31_19_and_7_gb_from_zero_0_to_3() -> None:
    whole, cut = (
        on(8, 7_000_000, 1000, precision="bf16", optimizer="adamw", sharding=sharding)
        for sharding in ("ddp", "fsdp")
    )
    zero_1 = whole.parameters + whole.gradients + cut.optimizer
    zero_2 = whole.parameters + cut.gradients + cut.optimizer
    sizes = [round(size / GB, 2) for size in (whole.total, zero_1, zero_2, cut.total)]
    assert sizes == [56, 31.5, 19.25, 7]


def test_hybrid_shards_within_a_node_only() -> None:
    recipe = Recipe.model_validate(
        {
            "precision": "fp32",
            "optimizer": "adamw",
            "sharding": "hybrid",
            "micro_batch_size": 1,
            "grad_accum": 1,
        }
    )
    held = states_of(matrix(16, 256, "fp32"), recipe, Ranks(world=8, per_node=4, on_gpu=True)).gpu
    assert held.parameters == 16 * 256 * 4 / 4


def test_two_a5000_hold_13_billion_parameters_with_everything_on_the_host() -> None:
    model, recipe, ranks = of_example("llama-13b", "runpod-2xa5000.yaml")
    assert model.numel == 13_142_798_336 and states_of(model, recipe, ranks).gpu.total == 0
    # 73.4 GiB: bf16 parameters, gradients, Lion's state.
    each = [states_of(model, recipe, ranks, rank).host.total for rank in range(ranks.per_node)]
    assert sum(each) == 6 * model.numel


def test_one_a6000_holds_7_billion_parameters_in_bf16_with_8_bit_states() -> None:
    held = states_of(*of_example("llama-7b", "runpod-a6000.yaml")).gpu
    # 6 bytes a parameter, the scales, and 6 bytes more for each of the embedding's 32000 x 4096.
    assert round(held.total / GIB, 2) == 38.58


def test_the_8_billion_brain_asks_for_6_26_gib_at_once_under_ddp() -> None:
    """The allocation that failed in the field, in the first optimizer step: the codes of the giant matrix."""
    sets = ("recipe.tensor=1", "recipe.sharding=ddp", "args.parts=1")
    model, recipe, _ = of_example("brain-8b", "tensor01.yaml", *sets)
    giant = max(model.parameters, key=lambda p: p.numel)
    asked = state_bytes(recipe, giant, shard_of(giant, 1, 0)) / 2 / (1 + 4 / 256)
    assert round(asked / GIB, 2) == 6.26
    sharded = states_of(
        *of_example("brain-8b", "tensor01.yaml", "recipe.tensor=1", "recipe.sharding=fsdp")
    ).gpu
    assert round(sharded.total / GIB, 2) == 9.77

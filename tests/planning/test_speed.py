"""The predicted step against published throughputs, and its parts against figures computed by hand."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

from launcher.memory.shapes import ModelShapes, Parameter
from launcher.memory.states import Ranks
from launcher.memory.trace import Affine, Work
from launcher.planning import speed
from launcher.planning.hardware import Hardware, gpu_type_of
from launcher.planning.speed import StepTime, step_time
from launcher.report.content import time_parts
from launcher.spec.errors import SpecError
from launcher.spec.job import Job
from launcher.spec.recipe import Recipe
from tests.planning.anchors import ANCHORS, llama, table, work

PAGE = Path(__file__).parents[2] / "benchmarks/results/speed-published.md"
PARAMETERS = 1_000_000
MODEL = ModelShapes((Parameter("weight", (1000, 1000), 4),), 0)
NOTHING = Work(*[Affine(0, 0)] * 4)


@pytest.mark.parametrize(
    "anchor", ANCHORS, ids=lambda one: f"{one.model}-{one.gpus}x{one.gpu.label}-{one.published}"
)
def test_a_published_throughput_is_predicted_within_its_tolerance(anchor):
    assert abs(anchor.error) < (0.07 if anchor.fitted else 0.20)


def test_half_of_the_rows_that_were_not_fitted_are_within_nine_percent():
    errors = [abs(one.error) for one in ANCHORS if not one.fitted]
    assert statistics.median(errors) < 0.09


def test_the_page_shows_the_table_as_it_is():
    assert table() in PAGE.read_text(), "python -m tests.planning.anchors prints the table"


@pytest.mark.slow
def test_the_work_in_closed_form_is_about_what_a_trace_counts():
    """So what was fitted to the one holds for the other."""
    from launcher.train.tracing.task_source import TaskSource

    layers, dim, heads, kv_heads, hidden, vocabulary, length = 2, 2048, 16, 4, 7168, 64_000, 2048
    model = {"layers": layers, "dim": dim, "heads": heads, "kv_heads": kv_heads, "hidden": hidden}
    args = {"context": length, "model": {**model, "vocabulary": vocabulary, "tied": False}}
    task = {"task": "launcher.tasks.llama:LanguageModel", "args": args}
    job = Job.model_validate({"name": "j", "steps": 1, "batch": {"global": 4}, **task})
    recipe = Recipe.model_validate({**RECIPE, "activations": "checkpoint"})
    counted = TaskSource(job, Path.cwd()).trace(recipe, Ranks(8, 8, on_gpu=True)).work
    closed = work(llama(layers, dim, dim * kv_heads // heads, hidden, vocabulary), length, "checkpoint")
    for one, other, tolerance in zip(counted[:4], closed[:4], (0.02, 0.1, 0.25, 0.25), strict=True):
        assert one.at(8) == pytest.approx(other.at(8), rel=tolerance)


RECIPE = {
    "precision": "bf16-mixed",
    "optimizer": "adamw",
    "sharding": "fsdp",
    "micro_batch_size": 4,
    "grad_accum": 3,
}


def timed(
    world: int = 8,
    per_node: int = 8,
    does: Work = NOTHING,
    gpu: str = "A100 80GB",
    offloaded: float = 0,
    **fields: Any,
) -> StepTime:
    recipe = Recipe.model_validate({**RECIPE, **fields})
    found = gpu_type_of(gpu)
    assert found is not None
    hardware = Hardware(gpu=found, inter_node=10e9, threads=2)
    return step_time(recipe, does, MODEL, Ranks(world, per_node, on_gpu=True), hardware, offloaded)


def on_ring(whole: float, over: int = 8) -> float:
    """Seconds over the NVLink of an A100."""
    return whole * (over - 1) / over / (300e9 * speed.NVLINK_REACHED)


@pytest.mark.parametrize(
    ("recipe", "seconds"),
    [
        ({"sharding": "ddp"}, 3 * on_ring(2 * 4 * PARAMETERS)),
        ({"sharding": "ddp", "grad_sync": "last"}, on_ring(2 * 4 * PARAMETERS)),
        ({"sharding": "zero1"}, 3 * on_ring(2 * 4 * PARAMETERS) + on_ring(4 * PARAMETERS)),
        ({"sharding": "zero1", "grad_sync": "last"}, on_ring((2 + 1) * 4 * PARAMETERS)),
        ({}, 3 * on_ring((2 + 2 + 4) * PARAMETERS)),
        ({"grad_sync": "last"}, on_ring((3 * (2 + 2) + 4) * PARAMETERS)),
        ({"sharding": "fsdp-keep"}, 3 * on_ring((2 + 4) * PARAMETERS)),
        ({"sharding": "fsdp-layers"}, 3 * on_ring((2 + 2 + 4) * PARAMETERS)),
        (
            {"sharding": "fsdp-layers", "activations": "checkpoint", "checkpoint_ratio": 0.5},
            3 * on_ring((2 + 1.5 * 2 + 4) * PARAMETERS),
        ),
        ({"precision": "fp32"}, 3 * on_ring((4 + 4 + 4) * PARAMETERS)),
    ],
    ids=str,
)
def test_gradients_and_parameters_travel_as_often_as_the_recipe_says(recipe, seconds):
    assert timed(**recipe).communication == pytest.approx(seconds)


def test_over_nodes_the_ring_is_as_fast_as_the_network_and_hybrid_spares_it():
    network = 10e9 * speed.NETWORK_REACHED
    assert timed(world=16).communication == pytest.approx(3 * 8 * PARAMETERS * 15 / 16 / network)
    replicas = 3 * 2 * 4 * PARAMETERS / 2 / network
    inside = 3 * on_ring(8 * PARAMETERS)
    assert timed(world=16, sharding="hybrid").communication == pytest.approx(inside + replicas)


def test_without_nvlink_the_ring_goes_over_pcie():
    expected = 3 * 8 * PARAMETERS * 7 / 8 / (32e9 * speed.PCIE_RING_REACHED)
    assert timed(gpu="RTX A6000").communication == pytest.approx(expected)


def test_what_a_tensor_parallel_group_exchanges_is_waited_for():
    nothing = Affine(0, 0)
    does = Work(Affine(0, 1e12), Affine(0, 2e12), nothing, nothing, Affine(0, 1e6), Affine(0, 2e6))
    time = timed(does=does, tensor=2, sharding="none", world=2, per_node=2)
    assert time.tensor == pytest.approx(on_ring(3 * 4 * 3e6, over=2))
    assert time.exposed == time.communication == time.tensor
    assert time.samples == 4 * 3


def test_shards_beside_tensor_parallel_groups_share_the_network_of_their_node():
    """Each rank gathers its own part: 4 rings per node move a quarter of the model each."""
    network = 10e9 * speed.NETWORK_REACHED
    alone, beside = timed(world=16, per_node=8), timed(world=16, per_node=8, tensor=4)
    assert alone.communication == pytest.approx(3 * 8 * PARAMETERS * 15 / 16 / network)
    assert beside.communication == pytest.approx(3 * 8 * PARAMETERS * 3 / 4 / (network / 4))
    within = timed(world=8, per_node=8, tensor=2)
    assert within.communication == pytest.approx(3 * on_ring(8 * PARAMETERS, over=4))


def test_a_pipeline_waits_for_its_messages_and_in_its_bubble():
    nothing = Affine(0, 0)
    does = Work(Affine(0, 1e12), Affine(0, 2e12), *[nothing] * 4, Affine(0, 1e6), Affine(0, 1e6))
    time = timed(does=does, pipeline=4, sharding="none", world=4, per_node=4)
    assert time.exposed == pytest.approx(3 * 4 * 2e6 / (300e9 * speed.NVLINK_REACHED))
    assert time.bubble == pytest.approx((4 - 1) / 3 * (time.compute + time.exposed))
    assert time.total == pytest.approx(2 * (time.compute + time.exposed) + time.optimizer)
    over_nodes = timed(does=does, pipeline=2, sharding="none", world=2, per_node=1)
    assert over_nodes.exposed == pytest.approx(3 * 4 * 2e6 / (10e9 * speed.NETWORK_REACHED))


def test_one_rank_communicates_nothing():
    assert timed(world=1, per_node=1, sharding="none").communication == 0


def test_communication_beside_long_kernels_costs_its_exposed_share():
    busy = timed(does=Work(Affine(0, 1e12), Affine(0, 2e12), Affine(0, 0), Affine(0, 0)))
    assert busy.exposed == pytest.approx(speed.EXPOSED * busy.communication)
    idle = timed()
    assert idle.exposed == pytest.approx(idle.communication)


def test_work_grows_with_the_micro_batch_and_adds_up_over_the_step():
    todo = Work(Affine(1e12, 2e12), Affine(0, 4e12), Affine(1e9, 1e9), Affine(0, 0))
    time = timed(does=todo)
    assert time.compute == pytest.approx(3 * (1e12 + 4 * 6e12) / (312e12 * speed.REACHED["Ampere"]))
    assert time.memory == pytest.approx(3 * 5e9 / (2039e9 * speed.MEMORY_REACHED))
    assert time.samples == 4 * 3 * 8 and time.samples_per_second == time.samples / time.total
    assert timed(does=todo, compile=True).memory == pytest.approx(speed.COMPILED * time.memory)


def test_the_optimizer_on_the_gpu_waits_for_its_memory():
    """Parameters and both states read and written, gradients read; clipping reads them twice, writes them."""
    traffic = (3 * 4 + 3 * 4 + 2 * 8) * PARAMETERS / 8
    assert timed(world=8).optimizer == pytest.approx(traffic / (2039e9 * speed.MEMORY_REACHED), rel=1e-3)


@pytest.mark.parametrize(("optimizer", "rate"), [("adamw", 700e6), ("adamw-8bit", 29e6)])
def test_the_optimizer_on_the_host_is_as_fast_as_its_threads(optimizer, rate):
    on_host = timed(world=1, per_node=1, offload="cpu-optimizer", optimizer=optimizer)
    clipping = 3 * 4 * PARAMETERS / speed.HOST_BANDWIDTH
    assert on_host.optimizer == pytest.approx(PARAMETERS / (2 * rate) + clipping, rel=0.01)
    pcie = 32e9 * speed.PCIE_REACHED
    on_links = timed(world=1, per_node=1).offload
    # Gradients go down after each of three passes, in which nothing is computed here; parameters up once.
    assert on_links == 0 and on_host.offload == pytest.approx((3 + 1) * 4 * PARAMETERS / pcie)
    in_buckets = timed(world=1, per_node=1, offload="cpu-optimizer", sharding="ddp")
    assert in_buckets.offload == pytest.approx(2 * 4 * PARAMETERS / pcie)


def test_states_on_a_disk_are_read_and_written_once_a_step():
    fields: dict[str, Any] = {"world": 1, "per_node": 1}
    more = (
        timed(offload="nvme-optimizer", **fields).offload - timed(offload="cpu-optimizer", **fields).offload
    )
    assert more == pytest.approx(2 * 8 * PARAMETERS / speed.NVME)


def test_offloaded_parameters_go_up_for_each_pass_and_gradients_down():
    time = timed(world=1, per_node=1, offload="cpu")
    assert time.offload == pytest.approx(3 * 3 * 4 * PARAMETERS / (32e9 * speed.PCIE_REACHED))


def test_offloaded_activations_go_down_and_up_again():
    time = timed(world=1, per_node=1, sharding="none", activations="offload", offloaded=1e9)
    assert time.offload == pytest.approx(3 * 2 * 1e9 / (32e9 * speed.PCIE_REACHED))


def test_float8_on_a_gpu_without_it_is_refused_with_what_runs():
    with pytest.raises(SpecError, match="use bf16-mixed on A100 80GB"):
        timed(precision="float8")


def test_the_printed_parts_of_a_step_add_up_to_it():
    names = [name for name in StepTime.model_fields if name != "samples"]
    values = {name: 2.0**power for power, name in enumerate(names)}
    # `exposed` is a part of `communication`, and `tensor` of both.
    time = StepTime(**{**values, "communication": 3 * values["exposed"], "samples": 8})
    assert sum(value for _, value, _ in time_parts(time)) == time.total
    assert all(value for _, value, _ in time_parts(time))

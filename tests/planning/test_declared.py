"""A command's model that is known by its size alone: its states are those of a real one."""

from __future__ import annotations

import pytest

from launcher.memory.formulas import formula_trace
from launcher.memory.states import Ranks, states_of
from launcher.planning.declared_params import DeclaredParams
from launcher.planning.model_source import About, NoTraceError
from launcher.planning.plan import NotEstimatedError, PlanRefusedError
from launcher.planning.recipe_and_ladder import Decider
from launcher.planning.traces import Traces
from launcher.spec.cluster import Cluster
from launcher.spec.job import Job
from launcher.spec.recipe import Recipe

COUNT = 8_499_653_234
RANKS = Ranks(8, 8, on_gpu=True)


def recipe(**fields: object) -> Recipe:
    chosen = {"precision": "fp32", "optimizer": "adamw", "sharding": "fsdp", **fields}
    return Recipe.model_validate({"micro_batch_size": 1, "grad_accum": 1, **chosen})


@pytest.mark.parametrize("count", [1, 5000, 200_000, COUNT])
def test_no_more_than_a_row_is_added(count: int) -> None:
    assert 0 <= DeclaredParams(count).shapes("fp32").numel - count < 4096


@pytest.mark.parametrize(
    ("fields", "parameter_bytes", "optimizer_bytes"),
    [
        ({}, 4, 8),
        ({"optimizer": "adamw-8bit"}, 4, 2 + 8 / 256),
        ({"precision": "bf16"}, 2, 4),
        ({"optimizer": "lion"}, 4, 4),
    ],
)
def test_states_per_parameter(fields: dict[str, str], parameter_bytes: float, optimizer_bytes: float) -> None:
    chosen = recipe(**fields)
    gpu = states_of(DeclaredParams(COUNT).shapes(chosen.precision), chosen, RANKS).gpu
    assert gpu.parameters == pytest.approx(parameter_bytes * COUNT / 8, rel=1e-4)
    assert gpu.optimizer == pytest.approx(optimizer_bytes * COUNT / 8, rel=1e-4)


def test_it_says_that_it_cannot_be_traced_and_what_would_help() -> None:
    source = DeclaredParams(COUNT)
    assert source.about().tokens_per_sample is None
    with pytest.raises(NoTraceError, match="hf:PATH"):
        source.trace(recipe(), RANKS)


def test_fsdp_gathers_a_part_of_the_model_at_a_time() -> None:
    source = DeclaredParams(COUNT)
    trace = formula_trace(source.shapes("fp32"), recipe(), RANKS, None)
    largest = max(moment.at(1) for moments in trace.highest().values() for moment in moments)
    assert largest < 4 * COUNT / 8 + 5 * 4 * COUNT / 32 * 1.01  # gradients, and up to five times a block


class Unknown(DeclaredParams):
    def about(self, args: object = None) -> About:
        return super().about()._replace(linear=False, tokens_per_sample=64)


def test_formulas_that_do_not_know_the_model_estimate_nothing() -> None:
    traces = Traces(Unknown(COUNT), RANKS, "fsdp")
    with pytest.raises(NotEstimatedError, match=r"not estimated.*only linear layers"):
        traces.profile(recipe())


def test_what_fits_in_bf16_alone_is_said_unless_the_job_sets_the_precision() -> None:
    gpu = {"type": "RTX 3070", "count": 1, "memory": "7.7GiB"}
    node = {"gpu": gpu, "memory": "32GiB"}
    cluster = Cluster.model_validate({"name": "c", "scheduler": "local", "node": node})
    task = {"name": "t", "task": "a:B", "steps": 1, "batch": {"global": 1}}
    for given, said in (({}, "fits only with parameters in bf16"), ({"precision": "fp32"}, "more host")):
        job = Job.model_validate({**task, "recipe": given})
        with pytest.raises(PlanRefusedError, match=said):
            Decider(job, cluster, DeclaredParams(2 * 10**9)).decide()


def test_of_a_command_that_does_not_fit_a_recipe_is_named_that_would() -> None:
    gpu = {"type": "NVIDIA RTX A5000", "count": 2, "memory": "23.6GiB"}
    node = {"gpu": gpu, "memory": "400GiB"}
    cluster = Cluster.model_validate({"name": "c", "scheduler": "local", "node": node})
    job = Job.model_validate({"name": "c", "command": "train", "batch": {"global": 2}})
    with pytest.raises(PlanRefusedError, match="would fit if the command trained with: offload: cpu"):
        Decider(job, cluster, DeclaredParams(13 * 10**9)).decide()
    with pytest.raises(PlanRefusedError, match="no other recipe fits: use more or larger GPUs"):
        Decider(job, cluster, DeclaredParams(400 * 10**9)).decide()

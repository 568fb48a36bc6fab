"""The bounds that spare estimates and traces, against estimates of every recipe."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from launcher.planning.fastest_recipe import Bounds, Candidate, Choice, choose
from launcher.planning.plan import PlanRefusedError
from launcher.planning.recipe_and_ladder import Decider, Decision
from launcher.planning.traces import args_key
from launcher.spec.cluster import Cluster
from launcher.spec.job import Job
from launcher.spec.quantities import GIB
from launcher.spec.recipe import REPLICATED, Recipe
from launcher.train.rank import SetupError
from launcher.train.tracing.task_source import TaskSource
from tests.planning.unusual_models import WIDTH

WIDE = {"layers": 8, "dim": 256, "heads": 4, "kv_heads": 4, "hidden": 1024, "vocabulary": 8192}


def decider(
    memory: int,
    gpus: int = 2,
    task: str = "launcher.tasks.llama:LanguageModel",
    overhead: int | None = None,
    gpu_type: str = "NVIDIA A100-SXM4-80GB",
    **recipe: Any,
) -> Decider:
    job = Job.model_validate(
        {
            "name": "bounded",
            "task": task,
            "args": {"model": WIDE, "context": 512} if "llama" in task else {},
            "batch": {"global": 8 * gpus},
            "steps": 1,
            "recipe": recipe,
            "train": {"find_unused_parameters": True} if "HeavyUnused" in task else {},
        }
    )
    gpu = {"type": gpu_type, "count": gpus, "memory": memory, "overhead": overhead}
    node = {"gpu": gpu, "cpus": 64, "memory": "500GiB"}
    cluster = Cluster.model_validate({"name": "one", "scheduler": "local", "node": node})
    return Decider(job, cluster, TaskSource(job, Path.cwd()))


FSDP = {"sharding": "fsdp", "optimizer": "adamw", "offload": "none", "optimizer_step": "after"}
ODD = (
    ("tests.planning.unusual_models:Named", 2, {"sharding": "ddp", "optimizer": "adamw"}),
    pytest.param(
        "tests.planning.unusual_models:HeavyHead", 1, {"optimizer": "adamw"}, marks=pytest.mark.slow
    ),
    pytest.param("tests.planning.unusual_models:Named", 1, {"optimizer": "adamw"}, marks=pytest.mark.slow),
    ("tests.planning.unusual_models:HeavyUnused", 1, {"optimizer": "adamw", "activations": "keep"}),
    pytest.param(
        "tests.planning.unusual_models:HeavyUnused", 2, {"optimizer": "adamw"}, marks=pytest.mark.slow
    ),
    pytest.param("tests.planning.unusual_models:Frozen", 3, {"optimizer": "adamw"}, marks=pytest.mark.slow),
)


@pytest.mark.parametrize(
    ("task", "gpus", "fixed"),
    [
        pytest.param("launcher.tasks.llama:LanguageModel", 2, FSDP, marks=pytest.mark.slow),
        *ODD,
        (
            "tests.planning.unusual_models:Differences",
            1,
            {"optimizer": "adamw", "offload": "none", "activations": "keep"},
        ),
        pytest.param("launcher.tasks.llama:LanguageModel", 1, {"optimizer": "adamw"}, marks=pytest.mark.slow),
    ],
)
def test_no_estimate_is_below_its_bounds(task: str, gpus: int, fixed: dict[str, Any]) -> None:
    planner = decider(80 * GIB, gpus, task, **fixed)
    space, evaluate = planner.space(), planner.evaluate
    # Traces the step that keeps everything.
    fastest = {rest: evaluate.speed(rest) for rest in space.combinations}
    sizes = [one for rest in space.combinations for one in space.sizes(rest)]
    bounds = {one: evaluate.at_least(one).needed for one in sizes}
    rough = {one: evaluate.roughly(one) for one in sizes}
    found = {one: evaluate(one) for one in sizes}
    needed = {one: candidate.estimate.needed for one, candidate in found.items()}
    assert all(bounds[one] <= needed[one] for one in sizes)
    assert all(evaluate.at_least(one).needed <= needed[one] for one in sizes), "with more traces"
    assert all(rough[one].estimate.needed <= needed[one] for one in sizes)
    assert all(rough[one].speed >= found[one].speed for one in sizes)
    assert all(fastest[rest] >= found[one].speed for rest in space.combinations for one in space.sizes(rest))
    for one in sizes:
        on_gpu, on_host = evaluate.least(one)
        assert on_gpu <= needed[one] and on_host <= found[one].estimate.host_per_node
        if one.activations in ("selective", "every-second"):
            assert needed[one.model_copy(update={"activations": "checkpoint"})] <= needed[one]
    if "llama" in task:
        assert {one.activations for one in sizes if bounds[one] > evaluate.least(one)[0] + GIB // 64} == {
            one.activations for one in sizes
        }


def without_bounds(planner: Decider) -> Bounds:
    """Bounds that exclude nothing, so that every size of every recipe is estimated."""
    least = planner.evaluate.at_least(planner.plan.recipe)
    nothing = least.model_copy(update={"reserved": 0, "overhead": {}, "host": {}})
    return Bounds(
        least=lambda _: (0, 0),
        speed=lambda _: math.inf,
        at_least=lambda _: nothing,
        traces_for=lambda _: False,
        roughly=planner.evaluate,
    )


@pytest.mark.parametrize(("task", "gpus", "fixed"), ODD)
def test_the_choice_is_that_of_estimating_every_recipe(task: str, gpus: int, fixed: dict[str, Any]) -> None:
    every = decider(80 * GIB, gpus, task, 1, **fixed)
    space = every.space()
    sizes = [one for rest in space.combinations for one in space.sizes(rest)]
    needed = sorted(every.evaluate(one).estimate.needed for one in sizes)
    for share in (0.0, 0.1, 0.3, 0.7):
        memory = int(needed[int(share * len(needed))] * 1.08)
        planner = decider(memory, gpus, task, 1, **fixed)
        choice = choose(planner.space(), planner.evaluate, planner.capacity, planner._bounds)
        exhaustive = choose(space, every.evaluate, planner.capacity, without_bounds(every))
        assert choice.chosen is not None and choice.chosen == exhaustive.chosen


@pytest.mark.parametrize(
    ("memory", "fits"), [(GIB // 2, False), pytest.param(2 * GIB, True, marks=pytest.mark.slow)]
)
def test_bounds_spare_traces_and_do_not_change_the_choice(memory: int, fits: bool) -> None:
    def traced_and_chosen(*, bounded: bool) -> tuple[int, Choice]:
        planner = decider(memory, **FSDP)
        bounds = planner._bounds
        if not bounded:
            least = planner.evaluate.at_least(planner.plan.recipe)
            nothing = least.model_copy(update={"reserved": 0, "overhead": {}})
            bounds = bounds._replace(at_least=lambda _: nothing, traces_for=lambda _: False)
        choice = choose(planner.space(), planner.evaluate, planner.capacity, bounds, nearest=False)
        return len(planner.evaluate.traces._traces), choice

    (some, choice), (others, other) = (traced_and_chosen(bounded=bounded) for bounded in (True, False))
    assert choice.chosen == other.chosen and (choice.chosen is not None) == fits
    assert some < others or fits


def test_a_choice_always_fits_by_a_complete_trace() -> None:
    planner = decider(80 * GIB, **FSDP, activations="checkpoint")
    refused: list[Recipe] = []

    def confirm(recipe: Recipe, args: Any = None) -> Candidate:
        """Find that ten recipes need more than their affine trace says."""
        found = planner.evaluate(recipe)
        if len(refused) < 10:
            refused.append(recipe)
            estimate = found.estimate.model_copy(update={"reserved": 100 * GIB})
            found = found.model_copy(update={"estimate": estimate})
        planner.evaluate._confirmed[recipe, args_key(args)] = found
        return found

    planner.evaluate.confirm = confirm  # type: ignore[method-assign]
    chosen = planner.choose(planner.space()).chosen
    assert len(set(refused)) == 10 and chosen is not None and chosen.recipe not in refused
    assert planner.capacity.misfit(chosen.estimate) is None


def test_work_that_is_not_affine_in_the_micro_batch_is_traced_for_each() -> None:
    planner = decider(
        80 * GIB, 1, "tests.planning.unusual_models:Looping", optimizer="adamw", activations="keep"
    )
    sizes = planner.space().sizes(planner.plan.recipe)
    times = [planner.evaluate(one).time for one in sizes]
    assert len(sizes) > 2
    # Each step has the same samples.
    assert len({round(time.compute * 1e15) for time in times if time is not None}) == 1


@pytest.mark.parametrize(("gpus", "sharding"), [(1, "none"), (2, "ddp")])
def test_a_model_that_fsdp_cannot_shard_is_planned_without_it(gpus: int, sharding: str) -> None:
    task = "tests.planning.unusual_models:Scaled"
    decision = decider(80 * GIB, gpus, task).decide()
    assert decision.plan.recipe.sharding == sharding
    assert "scale is a parameter without dimensions" in decision.notes[0]
    with pytest.raises(PlanRefusedError, match="scale is a parameter without dimensions") as refused:
        decider(2 * GIB, gpus, task, overhead=2 * GIB).decide()
    assert "memory runs out" not in str(refused.value), "there is no tensor that memory runs out for"
    with pytest.raises(SetupError, match="scale is a parameter without dimensions"):
        decider(80 * GIB, gpus, task, sharding="fsdp").decide()


def test_ddp_is_chosen_only_if_each_parameter_gets_a_gradient_and_a_job_that_fixes_it_is_warned() -> None:
    def decision(task: str, **recipe: Any) -> Decision:
        task = f"tests.planning.unusual_models:{task}"
        return decider(80 * GIB, 2, task, gpu_type="of unknown speed", **recipe).decide()

    assert decision("Looping", activations="keep").plan.recipe.sharding == "ddp"
    unused = decision("Unused")
    assert unused.plan.recipe.sharding == "fsdp-keep"
    assert not any(rung.sharding in REPLICATED for rung in unused.plan.ladder)
    assert unused.notes[0].startswith("DDP is left out: the loss does not use pooler.weight, pooler.bias")
    told = decision("Unused", sharding="ddp").plan
    assert told.recipe.sharding == "ddp" and "does not use pooler.weight" in told.warnings[-1]
    assert not decision("Scaled", sharding="ddp").plan.warnings


def test_offloaded_activations_take_host_memory() -> None:
    planner = decider(
        80 * GIB, 2, "tests.planning.unusual_models:Named", sharding="ddp", activations="offload"
    )
    sizes = planner.space().sizes(planner.plan.recipe)
    two, four = (
        next(
            planner.evaluate(one).estimate.host["activations"]
            for one in sizes
            if one.micro_batch_size == micro
        )
        for micro in (2, 4)
    )
    # In 16 bit, on two ranks: the hidden layers of two blocks, and what the first one gives the second.
    assert four - two == 2 * 2 * (2 * 64 * 8 * WIDTH * 2 + 64 * WIDTH * 2)


def test_each_rung_of_a_small_model_saves_memory() -> None:
    """Its savings are compared with a page of the allocator, and figures of one kind with each other."""
    task = {"task": "launcher.tasks.images:DigitClassifier", "model": {"batch_norm": True}}
    for size in (64, 512):
        job = Job.model_validate({"name": "small", **task, "batch": {"global": size}, "steps": 1})
        gpu = {"type": "NVIDIA A100-SXM4-80GB", "count": 1, "memory": "79GiB", "overhead": 1}
        node = {"gpu": gpu, "cpus": 64, "memory": "500GiB"}
        cluster = Cluster.model_validate({"name": "one", "scheduler": "local", "node": node})
        rungs = Decider(job, cluster, TaskSource(job, Path.cwd())).decide(confirm_rungs=True).rungs
        assert all(rung.saved > 0 for rung in rungs), [rung.words for rung in rungs]

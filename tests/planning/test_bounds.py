"""Lower bounds of memory that spare traces, against estimates from the traces that they spare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.planning.choice import Choice, choose
from launcher.planning.decide import Decider
from launcher.spec.base import GIB
from launcher.spec.cluster import Cluster
from launcher.spec.job import Job
from launcher.train.tracing.source import TaskSource

WIDE = {"layers": 8, "dim": 256, "heads": 4, "kv_heads": 4, "hidden": 1024, "vocabulary": 8192}


def decider(memory: int, gpus: int = 2, **recipe: Any) -> Decider:
    job = Job.model_validate(
        {
            "name": "bounded",
            "task": "launcher.tasks.llama:LanguageModel",
            "args": {"model": WIDE, "context": 512},
            "batch": {"global": 16},
            "steps": 1,
            "recipe": recipe,
        }
    )
    gpu = {"type": "NVIDIA A100-SXM4-80GB", "count": gpus, "memory": memory}
    node = {"gpu": gpu, "cpus": 64, "memory": "500GiB"}
    cluster = Cluster.model_validate({"name": "one", "scheduler": "local", "node": node})
    return Decider(job, cluster, TaskSource(job, Path.cwd()))


FSDP = {"sharding": "fsdp", "optimizer": "adamw", "offload": "none", "optimizer_step": "after"}


@pytest.mark.parametrize(
    ("gpus", "fixed"), [(2, FSDP), pytest.param(1, {"optimizer": "adamw"}, marks=pytest.mark.slow)]
)
def test_no_estimate_is_below_its_bounds(gpus: int, fixed: dict[str, Any]) -> None:
    planner = decider(80 * GIB, gpus, **fixed)
    space, evaluate = planner.space(), planner.evaluate
    for rest in space.rests:
        evaluate.speed(rest)  # traces the step that keeps all activations
    sizes = [one for rest in space.rests for one in space.sizes(rest)]
    bounds = {one: evaluate.at_least(one).needed for one in sizes}
    needed = {one: evaluate(one).estimate.needed for one in sizes}
    assert all(bounds[one] <= needed[one] for one in sizes)
    assert {one.activations for one in sizes if bounds[one] > evaluate.least(one)[0] + GIB // 64} == {
        one.activations for one in sizes
    }
    for one in sizes:
        if one.activations in ("selective", "every-second"):
            assert needed[one.model_copy(update={"activations": "checkpoint"})] <= needed[one]


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

"""Plans with tensor and pipeline parallelism."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.utils.parametrizations import weight_norm

from launcher.planning.declared_params import DeclaredParams
from launcher.planning.plan import NotEstimatedError, PlanRefusedError
from launcher.planning.recipe_and_ladder import Decider, Decision
from launcher.spec.cluster import Cluster
from launcher.spec.job import Job
from launcher.train.giant_layers import giant_layers
from launcher.train.task import Task
from launcher.train.tracing.task_source import TaskSource

GPU = {"type": "NVIDIA A100-SXM4-80GB", "count": 8, "memory": "79.1GiB"}
EIGHT = Cluster.model_validate({"name": "eight", "scheduler": "local", "node": {"gpu": GPU, "cpus": 64}})


SLOW = {"type": "NVIDIA RTX A6000", "count": 4, "memory": "47.4GiB"}
LLAMA = "launcher.tasks.llama:LanguageModel"


def job(task: str = LLAMA, batch: int = 16, args: dict[str, Any] | None = None, **recipe: Any) -> Job:
    fields = {"name": "parallel", "task": task, "batch": {"global": batch}, "steps": 1, "recipe": recipe}
    return Job.model_validate({**fields, "args": args or {}})


def decided(job: Job, gpu: dict[str, Any] = GPU) -> Decision:
    node = {"gpu": gpu, "cpus": 64, "memory": "500GiB"}
    cluster = Cluster.model_validate({"name": "one", "scheduler": "local", "node": node})
    return Decider(job, cluster, TaskSource(job, Path.cwd())).decide()


@pytest.mark.parametrize("name", ["tensor", "pipeline"])
def test_without_a_trace_no_part_of_a_model_is_said_to_fit(name: str) -> None:
    with pytest.raises(NotEstimatedError, match="not estimated, because the step cannot be traced"):
        Decider(job(**{name: 2}), EIGHT, DeclaredParams(1000)).decide()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"tensor": 2, "pipeline": 2}, {"tensor": 2}, {"pipeline": 2}], ids=str)
def test_a_fixed_mesh_stays_on_every_rung(mesh: dict[str, int]) -> None:
    data = 8 // math.prod(mesh.values())
    wide = {"layers": 4, "dim": 512, "heads": 8, "kv_heads": 8, "hidden": 1536, "vocabulary": 32_000}
    args = {"context": 4096, "model": wide}
    found = decided(job(args=args, batch=64, activations="keep", **mesh, loss_chunks=1))
    time = found.chosen.time
    assert time is not None and time.samples == 64
    assert (time.tensor > 0) == ("tensor" in mesh) and (time.bubble > 0) == ("pipeline" in mesh)
    assert found.rungs and all(r.recipe.model_dump().items() >= mesh.items() for r in found.rungs)
    assert all(r.recipe.micro_batch_size * r.recipe.grad_accum * data == 64 for r in found.rungs)
    layer = 4 * 512 * 512 + 3 * 512 * 1536 + 2 * 512
    assert found.parameters == 4 * layer + 2 * 32_000 * 512 + 512  # of the whole model


@pytest.mark.slow
def test_a_layer_is_split_where_links_decide_and_the_plan_says_why() -> None:
    """The autoencoder in tiny, over PCIe: to gather its matrices takes most of a step."""
    fixed = {"precision": "bf16-mixed", "activations": "keep", "optimizer": "adamw", "offload": "none"}
    brain = job("launcher.tasks.brain:BrainAutoencoder", args={"shape": "tiny"}, **fixed)
    found = decided(brain, SLOW)
    assert found.plan.recipe.tensor > 1
    assert "times as fast as the best recipe without" in found.plan.reason
    line = next(line for line in found.explained if line.startswith("tensor: "))
    assert line.count("samples/s") == 3


def test_a_job_that_fixes_its_tensor_is_planned_with_it_alone() -> None:
    found = decided(job(tensor=1, activations="keep"), SLOW)
    assert found.plan.recipe.tensor == 1
    assert not any(line.startswith("tensor: ") for line in found.explained)


def in_two_stages(**fixed: Any) -> Decision:
    small = {"layers": 4, "dim": 256, "heads": 4, "kv_heads": 4, "hidden": 768}
    plain = {"activations": "keep", "optimizer": "adamw", "offload": "none", "loss_chunks": 1}
    mesh = {"pipeline": 2, "sharding": "none", "tensor": 1, "grad_sync": "each"}
    asked = job(args={"context": 512, "model": small}, **plain, **mesh, **fixed)
    return decided(asked, {**GPU, "count": 2})


def test_stages_are_interleaved_where_a_pipeline_waits_and_the_plan_says_what_it_is_worth() -> None:
    found = in_two_stages(schedule="1f1b")
    assert found.plan.recipe.virtual_stages == 2
    [line] = [line for line in found.explained if line.startswith("virtual_stages: ")]
    assert re.search(r"\b1 (fits, |at least )\d+% slower", line)
    assert all(rung.recipe.virtual_stages == 2 for rung in found.rungs)


def test_gradients_of_weights_wait_where_that_is_faster_and_the_plan_says_so() -> None:
    found, plain = in_two_stages(virtual_stages=1), in_two_stages(virtual_stages=1, schedule="1f1b")
    assert found.plan.recipe.schedule == "zero-bubble"
    [line] = [line for line in found.explained if line.startswith("schedule: ")]
    assert re.search(r"\b1f1b (fits, |at least )\d+% slower", line)
    assert found.chosen.time is not None and plain.chosen.time is not None
    # A third, if the gradients of weights took half of a backward pass; they take less.
    assert plain.chosen.time.bubble / 3 < found.chosen.time.bubble < plain.chosen.time.bubble


@pytest.mark.slow
def test_layers_of_a_fixed_pipeline_are_split_where_links_decide() -> None:
    brain = job(
        "launcher.tasks.brain:BrainAutoencoder", args={"shape": "tiny"}, precision="bf16-mixed", pipeline=2
    )
    found = decided(brain, SLOW)
    assert (found.plan.recipe.tensor, found.plan.recipe.pipeline) == (2, 2)
    assert "times as fast as the best recipe without" in found.plan.reason


class Wide(Task):
    """A task without a plan of its own, whose first layer is gathered in 13 GB in bf16."""

    built_on_meta: ClassVar[bool] = True

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(1_640_448, 4096), nn.ReLU(), nn.Linear(4096, 1000))

    def initialise(self, model: nn.Module, seed: int) -> None: ...

    def data(self, split: str) -> Any:
        return [torch.zeros(1_640_448)]

    def loss(self, model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        return model(batch).float().square().sum(), len(batch)


@pytest.mark.slow
def test_a_giant_layer_is_cut_without_a_plan_of_the_task() -> None:
    fixed = {"precision": "bf16-mixed", "optimizer": "adamw", "offload": "none", "micro_batch_size": 1}
    wide = job("tests.planning.test_model_parallel:Wide", **fixed)
    with pytest.raises(PlanRefusedError, match="nothing fits"):
        decided(job("tests.planning.test_model_parallel:Wide", **fixed, tensor=1), SLOW)
    found = decided(wide, SLOW)
    assert found.plan.recipe.tensor == 4 and "because nothing fits without" in found.plan.reason


def test_only_plain_layers_of_their_own_weights_are_giant() -> None:
    side = 2**14
    with torch.device("meta"):
        layers = nn.ModuleDict(
            {
                "wide": nn.Linear(side, side + 1),
                "narrow": nn.Linear(side + 1, side, bias=False),
                "small": nn.Linear(side, side - 1),
                "tied": nn.Linear(side, side),
                "rows": nn.Embedding(side, side),
                "normed": weight_norm(nn.Linear(side, side)),
                "own": nn.Linear(side, side),
            }
        )
    layers["rows"].weight = layers["tied"].weight
    layers["own"].forward = lambda x: x
    styles = {name: type(style) for name, style in giant_layers(layers).items()}
    assert styles == {"wide": ColwiseParallel, "narrow": RowwiseParallel}

"""Blocks under torch.compile in a trace, beside real ones."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from launcher.memory.recipe_trace import kept_of
from launcher.memory.shapes import ModelShapes
from launcher.memory.states import Ranks
from launcher.planning.recipe_and_ladder import Decider
from launcher.spec.cluster import Cluster
from launcher.spec.job import Job
from launcher.spec.recipe import Recipe
from launcher.tasks.llama import LanguageModel
from launcher.train import Task
from launcher.train.activations.activations import apply_activations
from launcher.train.compiling.compiling import apply_compile, missing_compiler
from launcher.train.cpu_memory_budget import Unlimited
from launcher.train.tracing.compiled import NotCapturedError
from launcher.train.tracing.task_source import TaskSource
from launcher.train.tracing.tracer import Tracer

SHAPE = {"dim": 64, "heads": 4, "kv_heads": 2, "hidden": 176, "vocabulary": 128}
JOB = Job.model_validate({"name": "traced", "task": "a:B", "batch": {"global": 8}, "steps": 1})
ALONE = Ranks(1, 1, on_gpu=True)
GPU = {"type": "NVIDIA A40", "count": 1, "memory": "48GB"}
A40 = {"name": "one", "scheduler": "local", "node": {"gpu": GPU, "memory": "64GB"}}


def recipe(**fields: Any) -> Recipe:
    chosen = {"precision": "fp32", "optimizer": "adamw", "sharding": "none", "compile": True, **fields}
    return Recipe.model_validate({"micro_batch_size": 2, "grad_accum": 1, **chosen})


def llama(layers: int) -> LanguageModel:
    return LanguageModel(model={**SHAPE, "layers": layers}, context=32)


def built(layers: int, chosen: Recipe, backend: str) -> tuple[LanguageModel, nn.Module]:
    """A task and its model, compiled as in a run but for the backend."""
    torch.compiler.reset()
    task = llama(layers)
    model = task.model()
    task.initialise(model, 0)
    apply_activations(task.blocks(model), chosen, torch.device("cpu"), Unlimited())
    compiled = functools.partial(torch.compile, backend=backend)
    apply_compile(task.blocks(model), chosen, torch.device("cpu"), Unlimited(), compiled)
    return task, model


def really_kept(layers: int, chosen: Recipe, backend: str) -> int:
    """Bytes that autograd keeps in a real forward pass."""
    task, model = built(layers, chosen, backend)
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: dict[int, Any] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            kept[storage._cdata] = storage
        return tensor

    batch = torch.randint(0, SHAPE["vocabulary"], (chosen.micro_batch_size, 33))
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        task.loss(model, batch)
    return sum(storage.nbytes() for storage in kept.values())


SLOW = pytest.mark.slow


COMPILES = pytest.mark.skipif(missing_compiler(torch.device("cpu")) is not None, reason="no C++ compiler")
PARTITIONED = "aot_eager_decomp_partition"
"The graphs of the partitioner, run operator by operator: nothing has to be compiled."


@pytest.mark.parametrize(
    ("activations", "budget", "backend"),
    [
        pytest.param("selective", 1.0, PARTITIONED, marks=SLOW),
        pytest.param("keep", 1.0, PARTITIONED, marks=SLOW),
        pytest.param("every-second", 1.0, PARTITIONED, marks=SLOW),
        # Inductor simplifies the graph first, so with a budget another choice may be the best.
        pytest.param("budget", 0.4, "inductor", marks=(SLOW, COMPILES)),
        pytest.param("budget", 0.0, "inductor", marks=(SLOW, COMPILES)),
    ],
)
def test_a_compiled_block_keeps_what_the_partitioner_keeps(
    activations: str, budget: float, backend: str
) -> None:
    chosen = recipe(activations=activations, activation_budget=budget)
    traced = [
        kept_of(
            [Tracer(llama(layers), JOB, "cpu").sample(chosen, ALONE, 2)], ModelShapes((), 0)
        ).everywhere.at(2)
        for layers in (2, 4)
    ]
    real = [really_kept(layers, chosen, backend) for layers in (2, 4)]
    assert traced[1] - traced[0] == real[1] - real[0] > 0


@pytest.mark.slow
def test_a_compiled_step_has_the_flops_of_the_step_and_needs_less() -> None:
    tracer = Tracer(llama(4), JOB, "cuda")
    for activations in ("keep", "checkpoint"):
        chosen = recipe(activations=activations, precision="bf16-mixed")
        fused = tracer.sample(chosen, ALONE, 2)
        eager = tracer.sample(chosen.model_copy(update={"compile": False}), ALONE, 2)
        assert fused.work.forward_flops == eager.work.forward_flops
        for phase in ("forward", "backward"):
            most, whole = (max(one.at(2) for one in trace.highest()[phase]) for trace in (fused, eager))
            assert most <= whole
    assert sum(one.fixed for one in fused.storages) < sum(one.fixed for one in eager.storages)


@pytest.mark.slow
def test_a_lower_budget_keeps_less_and_computes_more() -> None:
    tracer = Tracer(llama(4), JOB, "cuda")
    traces = [
        tracer.sample(recipe(activations="budget", activation_budget=budget), ALONE, 2)
        for budget in (1.0, 0.5, 0.0)
    ]
    kept = [kept_of([trace], ModelShapes((), 0)).everywhere.at(2) for trace in traces]
    flops = [trace.work.backward_flops.at(2) for trace in traces]
    assert kept[0] > kept[1] > kept[2] and flops[0] <= flops[1] < flops[2]
    assert len({trace.work.forward_flops for trace in traces}) == 1
    plain = tracer.sample(recipe(), ALONE, 2)
    assert traces[0] == plain


@COMPILES
@pytest.mark.slow
def test_a_budget_changes_no_gradient() -> None:
    batch = torch.randint(0, SHAPE["vocabulary"], (2, 33), generator=torch.Generator().manual_seed(0))
    gradients = []
    for budget in (1.0, 0.4, 0.0):
        task, model = built(2, recipe(activations="budget", activation_budget=budget), "inductor")
        task.loss(model, batch)[0].backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    plain = gradients[0]
    for other in gradients[1:]:
        # Fused kernels add up in another order when they are cut elsewhere.
        assert (other - plain).norm() <= 1e-6 * plain.norm()


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_five_compiled_blocks_stand_for_all(sharding: str) -> None:
    tracer, chosen = Tracer(llama(8), JOB, "cuda"), recipe(sharding=sharding, precision="bf16-mixed")
    ranks = ALONE if sharding == "none" else Ranks(4, 4, on_gpu=True)
    folded = tracer.record(chosen, ranks)
    assert [run.extra for run in folded.runs] == [3]
    whole = tracer.sample(chosen, ranks, 2, whole=True, complete=True)
    assert whole == tracer.sample(chosen, ranks, 2, complete=True)


class Broken(Task):
    """A model whose blocks torch.compile can only capture in parts."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(16, 16), Breaks(), Breaks())

    def blocks(self, model: nn.Module) -> Any:
        return list(model)[1:]

    def data(self, split: str) -> Any:
        return [torch.zeros(16) for _ in range(8)]

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        return model(batch).sum(), len(batch)


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        torch._dynamo.graph_break()
        return x.exp()


def test_a_graph_break_is_told_apart_from_a_step_that_cannot_be_traced() -> None:
    with pytest.raises(NotCapturedError, match="graph_break"):
        Tracer(Broken(), JOB, "cuda").sample(recipe(), ALONE, 2)


@pytest.mark.parametrize(
    "task",
    ["test_compiled_trace:Broken", pytest.param("launcher.tasks.llama:LanguageModel", marks=SLOW)],
)
def test_a_plan_says_when_it_is_that_of_the_uncompiled_step(
    task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "test_compiled_trace", sys.modules[__name__])
    args = {} if "Broken" in task else {"model": {**SHAPE, "layers": 2}, "context": 32}
    fixed = {**recipe().model_dump(exclude={"micro_batch_size", "grad_accum", "grad_scaler"})}
    asked = {"name": "n", "task": task, "args": args, "batch": {"global": 4}, "steps": 1, "recipe": fixed}
    decisions = []
    for compiled in (True, False):
        job = Job.model_validate({**asked, "recipe": {**fixed, "compile": compiled}})
        source = TaskSource(job, Path(__file__).parent)
        decisions.append(Decider(job, Cluster.model_validate(A40), source).decide())
    estimate, eager = (decision.chosen.estimate for decision in decisions)
    sentences = [note for note in decisions[0].notes if "estimate is that of the uncompiled step" in note]
    if "Broken" in task:
        assert len(sentences) == 1 and "graph" in sentences[0]
        assert estimate.peaks == eager.peaks
        assert any("torch.compile" in one for one in estimate.not_modelled)
    else:
        assert not sentences
        assert not any("torch.compile" in one for one in estimate.not_modelled)

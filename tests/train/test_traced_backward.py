"""What a trace for GPUs knows of a backward pass: sums of gradients, and where cuBLAS takes its workspaces.

Autograd adds a tensor's gradients up in place where nothing else needs the first one. A dispatch mode
prevents this, so real steps run here without one, and torch's profiler measures them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.profiler import ProfilerActivity, profile

from launcher.memory.states import Ranks
from launcher.memory.trace import BATCH, PRODUCT
from launcher.train import Task
from launcher.train.tracing.storage_recorder import StorageRecorder
from launcher.train.tracing.tracer import Tracer, fake_ranks
from tests.train.test_tracing import JOB, recipe

WORDS, WIDTH, TIME = 1000, 64, 12
WEIGHT = WORDS * WIDTH * 4
SIDE = 256
SCALARS = 512
"Bytes: autograd has some numbers that the trace leaves out."


class Shared(nn.Module):
    """A shared embedding: each part of the sequence has its own gradient of it. `tied`: so has the head, and
    that gradient is a view."""

    def __init__(self, parts: int, tied: bool) -> None:
        super().__init__()
        self.parts, self.tied = parts, tied
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for part in words.chunk(self.parts, dim=1):
            x = self.embedding(part)
            for block in self.blocks:
                x = x + torch.tanh(block(x))
            if self.tied:
                x = (x @ self.embedding.weight.t()).exp()
            total = total + x.sum()
        return total


class Sums(Task):
    def __init__(self, parts: int, tied: bool) -> None:
        self.parts, self.tied = parts, tied

    def model(self) -> nn.Module:
        return Shared(self.parts, self.tied)

    def data(self, split: str) -> Any:
        return [torch.arange(TIME)] * 4

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        return model(batch), len(batch)


def real_peak(task: Task) -> int:
    """Peak bytes of a step in which each gradient is freed when it is complete, as in a trace."""
    model, batch = task.model(), task.collate(task.data("train")[:2])
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss, _ = task.loss(model, batch)
        loss.backward()
    return max(itertools.accumulate(changes_of(profiler)))


def changes_of(profiler: profile) -> list[int]:
    """Bytes that were allocated, or freed, in order."""
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = profiler.profiler.kineto_results.events()
    ordered = sorted(events, key=lambda event: event.start_ns())
    return [event.nbytes() for event in ordered if event.name() == "[memory]"]


def traced_peak(task: Task, like: Any) -> int:
    chosen = recipe(precision="fp32", sharding="none")
    trace = Tracer(task, JOB, like).sample(chosen, Ranks(1, 1, on_gpu=True), 2)
    counted = [None if one.category == BATCH else one for one in trace.storages]
    return max(moment.fixed for moments in trace.highest(counted).values() for moment in moments)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("parts", [1, 2, 6])
def test_a_trace_for_gpus_adds_gradients_up_as_autograd_does(parts: int, tied: bool) -> None:
    task = Sums(parts, tied)
    assert traced_peak(task, "cuda") == pytest.approx(real_peak(task), abs=SCALARS)


def test_on_the_cpu_a_memory_budget_is_a_mode_which_makes_each_sum_anew() -> None:
    task = Sums(2, tied=False)
    assert traced_peak(task, "cpu") == pytest.approx(traced_peak(task, "cuda") + WEIGHT, rel=0.02)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_first_matrix_product_of_each_pass_is_marked_once_it_has_its_output(compiled: bool) -> None:
    task, chosen = Sums(2, tied=False), recipe(precision="fp32", sharding="none", compile=compiled)
    sample = Tracer(task, JOB, "cuda").sample(chosen, Ranks(1, 1, on_gpu=True), 2, whole=True)
    output = 2 * TIME // 2 * WIDTH * 4  # of a block, and of its input's gradient
    for _, start in sample.phases[:2]:
        events = sample.events[start:]
        at = next(i for i, event in enumerate(events) if sample.storages[max(event, 0)].category == PRODUCT)
        assert sample.storages[events[at - 1]].fixed == output


class Scalar(torch.autograd.Function):
    """A function of a square matrix whose backward pass makes a gradient of the same kind."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.like = x.detach()
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(ctx.like)


def three_times(x: torch.Tensor) -> None:
    (Scalar.apply(x) + Scalar.apply(x) + Scalar.apply(x)).backward()


def recorded(x: torch.Tensor) -> None:
    total = Scalar.apply(x) + Scalar.apply(x) + Scalar.apply(x)
    torch.autograd.grad(total, x, create_graph=True)


SUMS: dict[str, tuple[Callable[[torch.Tensor], None], int]] = {
    "three gradients": (three_times, 2),
    "three gradients, with a graph": (recorded, 3),
    "one gradient twice": (lambda x: Scalar.apply(x + x).backward(), 3),
    "one gradient and a view of it": (lambda x: Scalar.apply(x + x.t()).backward(), 3),
}
"Each with the most tensors that are there at once: gradients, and the sum of a forward pass."


@pytest.mark.parametrize(
    ("sums", "dtensor"), [*((name, False) for name in SUMS), ("three gradients", True)], ids=str
)
def test_a_sum_is_made_anew_where_autograd_cannot_use_the_first_gradient(sums: str, dtensor: bool) -> None:
    backward, most = SUMS[sums]
    most += dtensor  # never in place

    def made() -> torch.Tensor:
        x = torch.ones(SIDE, SIDE)
        return (DTensor.from_local(x, mesh, [Shard(0)], run_check=False) if dtensor else x).requires_grad_()

    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        backward(made())  # DTensor's rules are cached
        recorder, x = StorageRecorder({}, [], {}, (), sums_in_place=True), made()
        recorder.begin("backward")
        recorder.leave_out([x])
        with recorder.following():
            backward(x)
        found, x = recorder.recorded, made()
        events = [event for segment in found.segments for event in segment.events]
        sizes = [one.fixed for one in found.storages]
        traced = [sizes[event] if event >= 0 else -sizes[~event] for event in events]
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            backward(x)
    for changes in (traced, changes_of(profiler)):
        assert max(itertools.accumulate(changes)) == pytest.approx(most * SIDE * SIDE * 4, abs=SCALARS)

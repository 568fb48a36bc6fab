"""What a trace for GPUs knows of a backward pass: sums of gradients, and where cuBLAS takes its workspaces.

Autograd adds a tensor's gradients up in place where nothing else needs the first one. A dispatch mode
prevents this, so real steps run here without one, and torch's profiler measures them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from launcher.memory.states import Ranks
from launcher.memory.trace import BATCH, PRODUCT, alone
from launcher.train import Task
from launcher.train.tracing.tracer import Tracer
from tests.train.test_tracing import JOB, recipe

WORDS, WIDTH, TIME = 1000, 64, 12
WEIGHT = WORDS * WIDTH * 4
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
    held = peak = 0
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = profiler.profiler.kineto_results.events()
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes() if event.name() == "[memory]" else 0
        peak = max(peak, held)
    return peak


def traced_peak(task: Task, like: Any) -> int:
    chosen = recipe(precision="fp32", sharding="none")
    trace = alone(Tracer(task, JOB, like).sample(chosen, Ranks(1, 1, on_gpu=True), 2))
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


def test_the_first_matrix_product_of_each_pass_is_marked_once_it_has_its_output() -> None:
    task, chosen = Sums(2, tied=False), recipe(precision="fp32", sharding="none")
    sample = Tracer(task, JOB, "cuda").sample(chosen, Ranks(1, 1, on_gpu=True), 2, whole=True)
    output = 2 * TIME // 2 * WIDTH * 4  # of a block, and of its input's gradient
    for _, start in sample.phases[:2]:
        events = sample.events[start:]
        at = next(i for i, event in enumerate(events) if sample.categories[max(event, 0)] == PRODUCT)
        assert sample.sizes[events[at - 1]] == output

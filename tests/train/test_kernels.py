"""Operators whose fake kernels torch lacks or makes too small: a trace holds what a real step does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from launcher.memory.states import Ranks
from launcher.train import Task
from launcher.train.cpu_memory_budget import MemoryBudget
from launcher.train.tracing.tracer import Tracer
from tests.train.test_tracing import JOB, recipe

TIME, WIDTH, LABELS = 130, 24, 7


class Recurrent(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, **{"hidden_size": 20, **options})
        self.head = nn.Linear(20 * (1 + self.lstm.bidirectional), LABELS)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.lstm(x)[0])


class Speech(Task):
    """Padded targets, or all targets in one row."""

    def __init__(self, *, row: bool = False, lengths: bool = False, **options: Any) -> None:
        self.row, self.lengths, self.options = row, lengths, options

    def model(self) -> nn.Module:
        return Recurrent(batch_first=True, **self.options)

    def data(self, split: str) -> Any:
        return [(torch.zeros(TIME, WIDTH), torch.ones(9, dtype=torch.int64)) for _ in range(4)]

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        x, targets = batch
        many = len(x)
        kind: Any = list if self.lengths else torch.tensor
        return (
            functional.ctc_loss(
                model(x).float().log_softmax(-1).transpose(0, 1),
                targets.flatten() if self.row else targets,
                kind([TIME] * many),
                kind([9] * many),
                reduction="sum",
            ),
            many,
        )


class Pictures(Task):
    """The loss is over as many values as the model has inputs."""

    def __init__(self, loss: str, reduction: str = "sum") -> None:
        self.of, self.reduction = getattr(functional, loss), reduction

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid())

    def data(self, split: str) -> Any:
        return [torch.rand(2, TIME, WIDTH) for _ in range(4)]

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        loss = self.of(model(batch[:, 0]).float(), batch[:, 1], reduction=self.reduction)
        return loss.sum() if self.reduction == "none" else loss, len(batch)


def kept_by(task: Task, micro: int) -> int:
    """Bytes that live after a real forward pass, without the parameters."""
    model, batch = task.model(), task.collate([task.data("train")[0]] * micro)
    with MemoryBudget(None) as budget:
        budget.track(batch)
        held = task.loss(model, batch)
        assert held[0].requires_grad
        return budget.live


def traced(task: Task, micro: int, passes: int = 1) -> int:
    """The same bytes in a trace, after the forward pass alone or after both passes."""
    chosen = recipe(precision="fp32", sharding="none")
    sample = Tracer(task, JOB, "cpu").sample(chosen, Ranks(1, 1, on_gpu=True), micro, complete=True)
    end, sizes = sample.phases[passes][1], [one.fixed for one in sample.storages]
    return sum(sizes[event] if event >= 0 else -sizes[~event] for event in sample.events[:end])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"row": True},
        {"lengths": True, "bidirectional": True, "num_layers": 2, "dropout": 0.1},
        {"bias": False},
    ],
    ids=["padded", "one row", "numbers, bidirectional", "no bias"],
)
def test_ctc_and_an_lstm_keep_what_a_real_step_keeps(options: dict[str, Any]) -> None:
    task = Speech(**options)
    assert traced(task, 3) == pytest.approx(kept_by(task, 3), rel=0.005)


@pytest.mark.parametrize(
    "loss",
    [
        "mse_loss",
        "smooth_l1_loss",
        "binary_cross_entropy",
        "soft_margin_loss",
        "l1_loss",
        "huber_loss",
        "binary_cross_entropy_with_logits",
    ],
)
def test_a_loss_over_pictures_keeps_what_a_real_step_keeps(loss: str) -> None:
    for reduction in ("sum", "none"):
        task = Pictures(loss, reduction)
        assert traced(task, 3) == pytest.approx(kept_by(task, 3), rel=0.02), reduction
    assert traced(task, 3, passes=2) == 0, "a CPU rank keeps numbers between micro-batches"


def test_attention_counts_the_heads_of_the_queries_and_takes_fewer_of_the_keys() -> None:
    """torch 2.11 refuses fewer of them."""
    query, key = torch.empty(2, 8, 16, 32, device="meta"), torch.empty(2, 2, 16, 32, device="meta")
    with FlopCounterMode(display=False) as counter:
        torch.ops.aten._scaled_dot_product_flash_attention(query, key, key)
    assert counter.get_total_flops() == 2 * 2 * (2 * 8 * 16 * 16 * 32)

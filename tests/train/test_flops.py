"""Model FLOPs against the closed form, and the GPUs whose peak is known."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from launcher.planning.hardware import peak_flops
from launcher.rundir.layout import RunDir
from launcher.tasks.gpt import BYTES, PydocGPT
from launcher.train import Task
from launcher.train.metrics.flops import Mfu, count_flops
from tests.train.runs import one_rank, recipe


@pytest.mark.parametrize("chunks", [1, 4])
def test_a_transformer_costs_six_flops_per_weight_and_twelve_per_pair_of_attention(chunks: int) -> None:
    layers, dim, length, batch = 3, 64, 32, 5
    task = PydocGPT(layers=layers, dim=dim, heads=4, context=length)
    task.loss_chunks = chunks
    before = torch.get_rng_state(), random.getstate()
    counted = count_flops(task, torch.zeros(batch, length + 1, dtype=torch.long))
    weights = layers * 12 * dim * dim + BYTES * dim  # qkv, out and MLP of each layer; the head
    assert counted == batch * length * (6 * weights + 12 * layers * dim * length)
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()


class Remembers(Task):
    """Keeps what it computes, as it is called on the model that is trained."""

    def __init__(self) -> None:
        self.mean, self.seen = torch.ones(4), [torch.ones(4)]

    def model(self) -> nn.Module:
        self.net = nn.Linear(4, 4)
        return self.net

    def data(self, split: str) -> Any: ...

    def loss(self, model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, float]:
        out = model(batch)
        self.seen.append(out.detach())
        self.mean.mul_(0.5)
        return out.sum(), 1.0


def test_counting_leaves_the_task_as_it_was() -> None:
    task = Remembers()
    net = task.model()
    assert count_flops(task, torch.zeros(2, 4)) == 3 * 2 * 2 * 4 * 4
    assert task.net is net and len(task.seen) == 1 and torch.equal(task.mean, torch.ones(4))


@torch.compile(backend="eager")
def is_compiled(x: torch.Tensor) -> bool:
    return torch.compiler.is_compiling()


class Compiles(Remembers):
    def loss(self, model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, float]:
        is_compiled(batch)
        return super().loss(model, batch)


def test_counting_does_not_keep_torch_from_compiling_what_the_task_compiles_itself() -> None:
    count_flops(Compiles(), torch.zeros(2, 4))
    assert is_compiled(torch.zeros(2, 4))


class Experts(nn.Module):
    """As transformers has a mixture of experts: each token goes through `chosen` of them."""

    def __init__(self, experts: int, dim: int, hidden: int, chosen: int) -> None:
        super().__init__()
        self.router, self.chosen = nn.Linear(dim, experts, bias=False), chosen
        self.weights = nn.Parameter(torch.zeros(experts, dim, hidden))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        experts = self.router(tokens).topk(self.chosen).indices.flatten().sort()
        counts = torch.histc(experts.values.int(), len(self.weights), 0, len(self.weights) - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        rows = tokens[experts.indices // self.chosen]
        return torch.nn.functional.grouped_mm(rows, self.weights, offs=ends)


class Mixture(Task):
    def model(self) -> nn.Module:
        return Experts(experts=4, dim=16, hidden=32, chosen=2)

    def data(self, split: str) -> Any: ...

    def loss(self, model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, float]:
        return model(batch).sum(), len(batch)


def test_the_products_of_the_chosen_experts_are_counted() -> None:
    """In fp32, too, which torch's own kernel for the meta device refuses."""
    tokens, products = 10, 2 * 16 * 32  # of two experts for each token
    assert count_flops(Mixture(), torch.zeros(tokens, 16)) == 3 * 2 * tokens * (16 * 4 + products)


class LooksAtValues(Task):
    def model(self) -> nn.Module:
        return nn.Linear(4, 4)

    def data(self, split: str) -> Any: ...

    def loss(self, model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, float]:
        total = model(batch).sum()
        return (total if total.item() > 0 else -total), 1.0


def test_mfu_is_the_share_of_the_peak_that_a_ranks_model_flops_make(tmp_path: Path) -> None:
    task, batch = PydocGPT(layers=1, dim=16, heads=2, context=8), torch.zeros(2, 9, dtype=torch.long)
    mfu = Mfu(one_rank(RunDir(tmp_path)), task, peak=1e9)
    assert mfu.of(0.5) is None, "no batch was seen"
    mfu.see(batch, 3)
    assert mfu.of(0.5) == pytest.approx(3 * count_flops(task, batch) / (0.5 * 1e9))
    shared = Mfu(one_rank(RunDir(tmp_path), recipe=recipe("none", tensor=2)), task, peak=1e9)
    shared.see(batch, 3)
    assert shared.of(0.5) == pytest.approx(mfu.of(0.5) / 2), "each of two ranks does half of the products"


def test_a_model_that_looks_at_values_has_no_mfu_and_says_so_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mfu = Mfu(one_rank(RunDir(tmp_path)), LooksAtValues(), peak=1e9)
    mfu.see(torch.zeros(2, 4), 1)
    assert mfu.of(1.0) is None and mfu.of(1.0) is None
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("no MFU: the model's FLOPs cannot be counted on the meta device (RuntimeError: ")


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA RTX A5000", 111.1),
        ("NVIDIA L4", 121),
        ("NVIDIA L40", 181),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("Tesla V100-SXM2-32GB", 125),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce GTX 1080 Ti", None),
    ],
)
def test_the_peak_of_a_gpu_is_known_exactly_or_not_at_all(name: str, tera: float | None) -> None:
    assert peak_flops(name) == (None if tera is None else tera * 1e12)

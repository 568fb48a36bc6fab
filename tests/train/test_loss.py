"""The chunked loss is the whole loss, with less memory."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from launcher.spec.recipe import WHOLE_LOSS
from launcher.train.cpu_memory_budget import MIB, MemoryBudget
from launcher.train.forward import check_loss
from launcher.train.loss import chunked_cross_entropy
from launcher.train.scaler import LossScaler
from launcher.train.skipped_steps import Guard
from launcher.train.task import TaskError
from tests.train.runs import error, job, prepare, recipe, start

TOKENS, DIM, VOCABULARY = 70, 8, 50


@pytest.fixture
def head() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(DIM, VOCABULARY)


@pytest.mark.parametrize("chunks", [1, 2, 7, 64, 100])
@pytest.mark.parametrize("ignored", [0.0, 0.3, 1.0])
def test_sum_weight_and_gradients_are_those_of_the_whole_loss(
    head: nn.Linear, chunks: int, ignored: float
) -> None:
    hidden = torch.randn(2, TOKENS // 2, DIM, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (2, TOKENS // 2))
    targets[torch.rand(targets.shape) < ignored] = -100
    logits = head(hidden).flatten(0, 1)
    whole = functional.cross_entropy(logits, targets.flatten(), reduction="sum")
    inputs = (hidden, head.weight, head.bias)
    expected = torch.autograd.grad(whole, inputs)

    total, weight = chunked_cross_entropy(hidden, head, targets, chunks)
    assert weight == (targets != -100).sum()
    torch.testing.assert_close(total, whole, rtol=1e-6, atol=0)
    for ours, theirs in zip(torch.autograd.grad(total, inputs), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_another_index_can_be_ignored(head: nn.Linear) -> None:
    hidden, targets = torch.randn(6, DIM), torch.tensor([0, 1, 0, 2, 0, 3])
    total, weight = chunked_cross_entropy(hidden, head, targets, 2, ignore_index=0)
    assert weight == 3
    kept = functional.cross_entropy(head(hidden[1::2]), targets[1::2], reduction="sum")
    torch.testing.assert_close(total, kept)


def test_eight_chunks_need_an_eighth_of_the_memory_for_logits() -> None:
    tokens, vocabulary = 256, 4096
    logits = tokens * vocabulary * 4  # 4 MiB
    peaks = {chunks: _peak(tokens, vocabulary, chunks) for chunks in (1, 8)}
    # Logits, log-softmax and one gradient; the parts need one of them, for an eighth of the tokens.
    assert peaks[1] == pytest.approx(3 * logits, rel=0.25)
    assert peaks[8] == pytest.approx(logits / 8, rel=0.5)


def test_the_gradient_of_the_weight_exists_once(head: nn.Linear) -> None:
    tokens, vocabulary = 64, 16384
    weight = vocabulary * DIM * 4
    logits = tokens * vocabulary * 4 // 8
    assert _peak(tokens, vocabulary, 8) == pytest.approx(weight + logits, rel=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_linear_head_has_the_gradients_of_any_other(dtype: torch.dtype) -> None:
    """In fp16 with a scaled loss, whose unscaled gradients would be zero."""
    torch.manual_seed(0)
    head = nn.Linear(DIM, VOCABULARY).to(dtype)
    hidden = torch.randn(TOKENS, DIM, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (TOKENS,))
    targets[::5] = -100
    inputs = (hidden, head.weight, head.bias)
    scale = 1e-6 * 2.0**14
    ours, others = (
        torch.autograd.grad(chunked_cross_entropy(hidden, each, targets, 4)[0] * scale, inputs)
        for each in (head, lambda x: head(x))
    )
    for one, other in zip(ours, others, strict=True):
        assert one.dtype == dtype
        assert other.abs().max() > 0
        rounding = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(one, other, rtol=rounding, atol=rounding * other.abs().max().item())


def test_a_linear_head_computes_in_autocasts_type() -> None:
    torch.manual_seed(0)
    head = nn.Linear(DIM, VOCABULARY)
    hidden = torch.randn(TOKENS, DIM, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (TOKENS,))
    results = []
    for each in (head, lambda x: head(x)):
        with torch.autocast("cpu", torch.bfloat16):
            total, _ = chunked_cross_entropy(hidden, each, targets, 4)
        results.append((total, *torch.autograd.grad(total, (hidden, head.weight, head.bias))))
    for one, other in zip(*results, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)


def test_hooks_of_a_linear_head_see_its_logits(head: nn.Linear) -> None:
    head.register_forward_hook(lambda _, __, logits: 2 * logits)
    hidden, targets = torch.randn(TOKENS, DIM), torch.randint(0, VOCABULARY, (TOKENS,))
    whole = functional.cross_entropy(head(hidden), targets, reduction="sum")
    torch.testing.assert_close(chunked_cross_entropy(hidden, head, targets, 4)[0], whole)


@pytest.mark.parametrize("chunks", [1, 4])
def test_a_weight_is_a_head(head: nn.Linear, chunks: int) -> None:
    hidden, targets = torch.randn(TOKENS, DIM), torch.randint(0, VOCABULARY, (TOKENS,))
    whole = functional.cross_entropy(hidden @ head.weight.T, targets, reduction="sum")
    torch.testing.assert_close(chunked_cross_entropy(hidden, head.weight, targets, chunks)[0], whole)


@pytest.mark.parametrize("chunks", [1, 4])
def test_a_target_outside_of_the_vocabulary_is_named(head: nn.Linear, chunks: int) -> None:
    targets = torch.full((TOKENS,), VOCABULARY)
    with pytest.raises(IndexError, match=f"Target {VOCABULARY} is out of bounds"):
        chunked_cross_entropy(torch.randn(TOKENS, DIM), head, targets, chunks)


@pytest.mark.slow
def test_a_task_that_builds_the_whole_logits_refuses_a_recipe_with_chunks(tmp_path: Path) -> None:
    run = prepare(tmp_path / "run", job())
    assert start(run, recipe("none", micro=8, loss_chunks=4), ranks=1).codes == {0: 1}
    failure = error(run.attempt(0), 0)
    assert failure["failure"] == "user-error"
    assert f"loss_chunks: 4: {WHOLE_LOSS}" in failure["exception"]


def _peak(tokens: int, vocabulary: int, chunks: int) -> int:
    """Bytes above what is there before."""
    head = nn.Linear(DIM, vocabulary, bias=False)
    hidden = torch.randn(tokens, DIM, requires_grad=True)
    targets = torch.randint(0, vocabulary, (tokens,))
    with MemoryBudget(64 * MIB) as budget:
        budget.track([head.weight, hidden, targets])
        before = budget.live
        chunked_cross_entropy(hidden, head, targets, chunks)[0].backward()
    return budget.peak - before


@pytest.mark.parametrize("weight", [torch.ones(4), None, "4"])
def test_a_weight_that_is_no_number_is_an_error_of_the_task(weight: Any) -> None:
    total = torch.ones((), requires_grad=True)
    check_loss("loss() of Mine", (total, torch.ones(1, 1)))
    with pytest.raises(TaskError, match=r"loss\(\) of Mine returned the weight .* must be a number"):
        check_loss("loss() of Mine", (total, weight))


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_a_weight_in_16_bit_is_refused(kind: torch.dtype) -> None:
    """257 ones add up to 256 in bf16, and 70,000 to infinity in fp16: then no gradient is left."""
    total = torch.ones((), requires_grad=True)
    with pytest.raises(TaskError, match=f"returned a weight in {kind}"):
        check_loss("loss() of Mine", (total, torch.ones((), dtype=kind)))


def test_a_step_whose_weight_is_not_finite_is_skipped() -> None:
    reason = Guard(LossScaler(enabled=False)).refuses(loss=1.0, weight=math.inf, grad_norm=0.0)
    assert reason == "not finite: the weight of the loss, inf"

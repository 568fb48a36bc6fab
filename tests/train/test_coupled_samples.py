"""Whether a loss couples samples is found out from one batch and its halves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from launcher.rundir.layout import RunDir
from launcher.spec.events import CouplesSamples
from launcher.train.coupled_samples import MAX_COMPARED, MAX_LOOKED_AT, Split, split, to_compare
from launcher.train.detected_properties import setting_of
from launcher.train.rank import SetupError
from tests.train.conditioned import Conditioned
from tests.train.runs import job, one_rank, prepare, recipe, start

SAMPLES = [torch.randn(16, generator=torch.Generator().manual_seed(number)) for number in range(8)]


def apart(batch: torch.Tensor) -> Any:
    return batch.square().sum(), len(batch)


def mean(batch: torch.Tensor) -> Any:
    """No sum, as it should be, but no coupling either."""
    return batch.square().mean(), 1


def tokens(batch: torch.Tensor) -> Any:
    kept = batch > 0
    return batch[kept].sum(), kept.sum()


def noisy(batch: torch.Tensor) -> Any:
    time = torch.rand(len(batch), 1)
    return (batch * time + torch.randn_like(batch)).square().sum(), len(batch)


def dropped(batch: torch.Tensor) -> Any:
    return functional.dropout(batch, 0.5).square().sum(), len(batch)


def contrastive(batch: torch.Tensor) -> Any:
    logits = functional.normalize(batch) @ functional.normalize(batch + 0.1).T
    return functional.cross_entropy(logits, torch.arange(len(batch)), reduction="sum"), len(batch)


def noisy_contrastive(batch: torch.Tensor) -> Any:
    return contrastive(batch + 0.1 * torch.randn_like(batch))


def variance(batch: torch.Tensor) -> Any:
    return len(batch) * (1 - batch.std(0)).relu().sum(), len(batch)


def not_a_number(batch: torch.Tensor) -> Any:
    return batch.sum() * float("nan"), len(batch)


def averaged(batch: torch.Tensor) -> Any:
    """Twice divided: by the task, and by launcher."""
    return batch.square().mean(), len(batch)


def averaged_tokens(batch: torch.Tensor) -> Any:
    kept = batch > 0
    return batch[kept].mean(), kept.sum()


def averaged_dropped(batch: torch.Tensor) -> Any:
    return functional.dropout(batch, 0.1).square().mean(), len(batch)


def noisy_mean(batch: torch.Tensor) -> Any:
    return (batch.square().mean(1) * (0.5 + torch.rand(len(batch)))).mean(), len(batch)


def very_noisy_mean(batch: torch.Tensor) -> Any:
    return (batch.square().mean(1) * torch.randn(len(batch)).exp().square()).mean(), len(batch)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        *((loss, Split.SUM) for loss in (apart, mean, tokens, noisy, dropped, not_a_number)),
        *((loss, Split.COUPLED) for loss in (contrastive, noisy_contrastive, variance)),
        (very_noisy_mean, Split.UNDECIDED),
        *((loss, Split.MEAN) for loss in (averaged, averaged_tokens, averaged_dropped, noisy_mean)),
    ],
)
def test_a_loss_is_a_sum_a_mean_or_couples_samples(
    loss: Callable[[torch.Tensor], Any], expected: Split
) -> None:
    def sums_of(some: list[torch.Tensor]) -> tuple[float, float]:
        total, weight = loss(torch.stack(some))
        return float(total), float(weight)

    for size in (2, 3, 8):
        if loss is variance and size < 4:
            continue  # of one sample there is none
        assert split(sums_of, SAMPLES[:size], torch.manual_seed) == expected, size


@pytest.mark.parametrize("long", [(MAX_LOOKED_AT - 1,), (0, MAX_COMPARED - 1), (3,)])
def test_a_loss_that_counts_padding_couples_samples_wherever_the_longer_ones_are(
    long: tuple[int, ...],
) -> None:
    samples = [torch.ones(9 if number in long else 3) for number in range(MAX_LOOKED_AT)]

    def sums_of(some: list[torch.Tensor]) -> tuple[float, float]:
        padded = torch.nn.utils.rnn.pad_sequence(some, batch_first=True)
        return float((padded - 2).square().mean(1).sum()), len(some)

    compared = to_compare(iter(samples), len, 16)
    assert len(compared) == MAX_COMPARED
    assert split(sums_of, compared, torch.manual_seed) == Split.COUPLED


def test_no_more_samples_are_compared_than_a_micro_batch_has() -> None:
    assert to_compare(iter([(1,), (2,), (2, 1), (3,)]), len, 2) == [(1,), (2, 1)]
    assert to_compare(iter([(1,), (2,)]), len, 2) == [(1,), (2,)]
    assert to_compare(iter([(1,)]), len, 2) == [(1,)]


def test_what_a_batch_leaves_behind_is_no_coupling() -> None:
    """A running mean that the loss uses, put back before each batch."""
    state = torch.zeros(16)

    def begin(seed: int) -> None:
        torch.manual_seed(seed)
        state.zero_()

    def sums_of(some: list[torch.Tensor]) -> tuple[float, float]:
        total = sum(float((one - state).square().sum()) for one in some)
        state.add_(5)
        return total, len(some)

    assert split(sums_of, SAMPLES, begin) == Split.SUM


def test_a_batch_norm_is_no_coupling(tmp_path: Path) -> None:
    """Samples are compared with its running statistics, in each of the batches."""
    run = prepare(tmp_path / "run", job(task="normed:Normed", steps=1, args={"dropout": 0}))
    assert start(run, recipe("none", micro=8), ranks=1).codes == {0: 0}
    assert not any(isinstance(event, CouplesSamples) for event in run.read_events())


def test_a_recipe_that_cannot_train_an_undeclared_model_is_refused_with_what_to_declare(
    tmp_path: Path,
) -> None:
    one, two = (one_rank(RunDir(tmp_path), recipe=recipe("none", micro=micro)) for micro in (1, 2))
    plain, normed = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    task, coupled = Conditioned.__new__(Conditioned), Conditioned.__new__(Conditioned)
    coupled.couples_samples = True  # type: ignore[misc]
    assert setting_of(normed, coupled, two) == two.setting(batch_norm=True, couples_samples=True)
    assert setting_of(plain, task, one) == one.setting(batch_norm=False)
    with pytest.raises(SetupError, match=r"^1 of the model: .*`model: \{batch_norm: true\}` in the job file"):
        setting_of(normed, task, one)
    with pytest.raises(SetupError, match=r"`model: \{couples_samples: true\}` in the job file"):
        setting_of(plain, coupled, one)

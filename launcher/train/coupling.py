"""What a loss does when its micro-batch is split: it adds up, or it is a mean, or it couples samples."""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from launcher.spec.rules import broken_rules
from launcher.train.rank import Rank, SetupError
from launcher.train.task import Task

DRAWS = (8, 32)
"Times that a loss which draws random numbers is computed, whole and in halves: more where two kinds fit."
RELATIVE = 0.01
"""Least difference of the means. A sample's loss depends on the batch by rounding alone: 1e-6 in fp32, some
1e-3 in bf16 and TF32. Contrastive losses of 8 and of 4 samples, with logits near 0, are ln(8) and ln(4)."""
DEVIATIONS = 6.0
"Least difference in standard errors, where the loss draws random numbers."


def check_coupling(task: Task, rank: Rank) -> bool:
    """True when the task declares a coupling that the job file does not. Raises SetupError for a recipe that
    cannot train it: the plan may have been made without the task."""
    if not task.couples_samples:
        return False
    for broken in broken_rules(rank.recipe, rank.setting(batch_norm=False, couples_samples=True)):
        if broken.rule.name == "coupled-samples-need-two":
            raise SetupError(
                f"{broken}. With `model: {{couples_samples: true}}` in the job file the plan sees it"
            )
    return not rank.job.model.couples_samples


class Split(enum.IntEnum):
    """What the loss of a batch is to those of its halves."""

    SUM = 0
    "Their sum, as `Task.loss` has to be; also where it cannot be asked."
    UNDECIDED = 1
    "It draws random numbers, and they hide what it is."
    COUPLED = 2
    "Something else: its samples depend on each other."
    MEAN = 3
    "Their mean: a gradient that is divided by the weight again is too small by that factor."


def split(
    sums_of: Callable[[list[Any]], tuple[float, float]],
    samples: Sequence[Any],
    begin: Callable[[int], object],
) -> Split:
    """Compare the loss of `samples` at once with that of their halves.

    `sums_of`: loss and weight of a micro-batch of some samples. `begin`: puts everything back and seeds what
    it draws from. A loss that draws (noise levels, masks, dropout) has other values for each split: then
    means of several draws are compared.
    """
    middle = len(samples) // 2
    parts = [list(samples[:middle]), list(samples[middle:])]
    if not all(parts):
        return Split.SUM

    def found(number: int, *batches: list[Any]) -> tuple[float, float]:
        """Per unit of weight: the sum of the losses, and their mean over the batches by weight."""
        losses = weighted = weights = 0.0
        for at, batch in enumerate(batches):
            begin(2 * number + at)  # no batch sees what another has left in a buffer
            loss, weight = sums_of(batch)
            losses, weighted, weights = losses + loss, weighted + loss * weight, weights + weight
        return (losses / weights, weighted / weights / weights) if weights else (0.0, 0.0)

    whole = [found(number, list(samples))[0] for number in range(2)]
    if not all(map(math.isfinite, whole)):
        return Split.SUM
    draws = DRAWS if whole[0] != whole[1] else (1,)
    halved: list[tuple[float, float]] = []
    for number in draws:
        whole += [found(at, list(samples))[0] for at in range(len(whole), number)]
        # Other seeds than those of the whole, where there is chance in it.
        halved += [found(at + (draws[-1] if number > 1 else 0), *parts) for at in range(len(halved), number)]
        kinds = [
            kind
            for kind, values in zip(KINDS, zip(*halved, strict=True), strict=True)
            if _same(whole, values)
        ]
        if len(kinds) < len(KINDS) or whole[0] == 0.0:
            return kinds[0] if kinds else Split.COUPLED
    return Split.UNDECIDED if len(draws) > 1 else Split.SUM


KINDS = (Split.SUM, Split.MEAN)


def _same(whole: Sequence[float], halved: Sequence[float]) -> bool:
    number = len(halved)
    spread = statistics.variance(whole) + statistics.variance(halved) if number > 1 else 0.0
    return not _differ(statistics.mean(whole), statistics.mean(halved), DEVIATIONS * (spread / number) ** 0.5)


def _differ(one: float, other: float, noise: float) -> bool:
    """NaN differs from nothing."""
    return abs(one - other) > max(noise, RELATIVE * max(abs(one), abs(other)))

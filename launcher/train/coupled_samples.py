"""Check what splitting a micro-batch does to a loss: whether it is a sum, a mean, or couples samples."""

from __future__ import annotations

import enum
import itertools
import math
import operator
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

DRAWS = (8, 32)
"How often a random loss is computed, whole and in halves; the second number if two kinds still fit."
RELATIVE = 0.01
"""Smallest relative difference of the means that counts. Rounding makes a sample's loss depend on its batch
by 1e-6 in fp32 and about 1e-3 in bf16 and TF32. Contrastive losses of 8 and of 4 samples, with logits near 0,
are ln(8) and ln(4)."""
DEVIATIONS = 6.0
"Smallest difference that counts for a random loss, in standard errors."


MAX_COMPARED, MAX_LOOKED_AT = 8, 32
"Maximum number of samples that are compared, and of samples searched for one of another size."


def to_compare(samples: Iterable[Any], size: Callable[[Any], int], most: int) -> list[Any]:
    """Return up to `most` samples for `split`, in the order of their sizes, and of at least two sizes if the
    first samples have them.

    Padding couples a sample only with larger ones, so one half must not have the largest.
    """
    left = itertools.islice(samples, MAX_LOOKED_AT)
    chosen = [(size(sample), sample) for sample in itertools.islice(left, min(most, MAX_COMPARED))]
    if len({number for number, _ in chosen}) == 1:
        others = ((number, sample) for sample in left if (number := size(sample)) != chosen[0][0])
        chosen[-1] = next(others, chosen[-1])
    return [sample for _, sample in sorted(chosen, key=operator.itemgetter(0))]


class Split(enum.IntEnum):
    """The relation of a batch's loss to the losses of its halves."""

    SUM = 0
    "Their sum, as `Task.loss` must be; also used if the relation cannot be checked."
    UNDECIDED = 1
    "Unknown: random numbers in the loss hide the relation."
    COUPLED = 2
    "Something else: the samples depend on each other."
    MEAN = 3
    "Their mean: launcher would divide by the weight a second time, and the gradient would be too small."


def split(
    sums_of: Callable[[list[Any]], tuple[float, float]],
    samples: Sequence[Any],
    begin: Callable[[int], object],
) -> Split:
    """Compare the loss of all `samples` with the losses of their halves.

    `sums_of` returns loss and weight of a micro-batch of some samples. `begin` restores all state and seeds
    the generators. A random loss (noise levels, masks, dropout) differs between splits, so the means of
    several draws are compared.
    """
    middle = len(samples) // 2
    parts = [list(samples[:middle]), list(samples[middle:])]
    if not all(parts):
        return Split.SUM

    def loss_per_weight(number: int, *batches: list[Any]) -> tuple[float, float]:
        """Return, per unit of weight, the sum of the losses and their weighted mean over the batches."""
        losses = weighted = weights = 0.0
        for at, batch in enumerate(batches):
            begin(2 * number + at)  # no batch sees buffers that another one has changed
            loss, weight = sums_of(batch)
            losses, weighted, weights = losses + loss, weighted + loss * weight, weights + weight
        return (losses / weights, weighted / weights / weights) if weights else (0.0, 0.0)

    whole = [loss_per_weight(number, list(samples))[0] for number in range(2)]
    if not all(map(math.isfinite, whole)):
        return Split.SUM
    draws = DRAWS if whole[0] != whole[1] else (1,)
    halved: list[tuple[float, float]] = []
    for number in draws:
        whole += [loss_per_weight(at, list(samples))[0] for at in range(len(whole), number)]
        # A random loss uses other seeds for the halves than for the whole.
        halved += [
            loss_per_weight(at + (draws[-1] if number > 1 else 0), *parts)
            for at in range(len(halved), number)
        ]
        kinds = [
            kind
            for kind, values in zip(KINDS, zip(*halved, strict=True), strict=True)
            if _means_agree(whole, values)
        ]
        if len(kinds) < len(KINDS) or whole[0] == 0.0:
            return kinds[0] if kinds else Split.COUPLED
    return Split.UNDECIDED if len(draws) > 1 else Split.SUM


KINDS = (Split.SUM, Split.MEAN)


def _means_agree(whole: Sequence[float], halved: Sequence[float]) -> bool:
    number = len(halved)
    spread = statistics.variance(whole) + statistics.variance(halved) if number > 1 else 0.0
    return not _differ(statistics.mean(whole), statistics.mean(halved), DEVIATIONS * (spread / number) ** 0.5)


def _differ(one: float, other: float, noise: float) -> bool:
    """Return True if the values differ by more than noise. NaN differs from nothing."""
    return abs(one - other) > max(noise, RELATIVE * max(abs(one), abs(other)))

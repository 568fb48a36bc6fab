"""Find data that differ between ranks.

Tensor-parallel ranks and the stages of a pipeline fetch the same samples separately. A dataset with random
numbers that launcher does not seed gives each rank different samples: the last stage would compare the
output for one input with the target of another one.

Data-parallel ranks fetch different samples of one dataset. If data() divides it among the ranks, each takes a
part of its part.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from launcher.spec.mesh import model_parallel
from launcher.train.rank import Rank
from launcher.train.rng import numpy

COMPARED = 16
"Number of micro-batches of training, and of evaluation, that the ranks compare in an attempt."
ROW, ROWS = 1024, 1024
"Values per row, each row being multiplied by the same factors; rows that are multiplied at once."
APART = 1e-3
"Largest difference of two ranks' numbers that comes from rounding, such as on two types of processors."
DIFFERENT = (
    "the ranks that share a copy of the model got different samples: data() or collate() of the task draws "
    "random numbers that launcher does not seed (such as numpy.random.default_rng() or os.urandom), or "
    "depends on the rank. Use the global generators of torch, random or numpy, which are seeded for each "
    "sample, or seed by the sample's index"
)


DIVIDED = (
    'a sample of data("train") is not the same on every rank. launcher takes each rank\'s part of the '
    "samples itself: if data() divides them, or chooses them by random numbers that launcher does not seed, "
    "some are never used"
)


def are_divided(numbers: Sequence[Sequence[float]]) -> bool:
    """Return whether ranks have different samples under one index.

    `numbers` has, for each rank, `number_of` the sample from each fetch. If these differ on one rank, the
    sample depends on random numbers that launcher does not seed, and the result is False.
    """
    steady = all(max(own) - min(own) <= APART for own in numbers if own)
    numbers_seen = [number for own in numbers for number in own]
    return steady and bool(numbers_seen) and max(numbers_seen) - min(numbers_seen) > APART


class SameSamples:
    """A fingerprint of the samples that this rank has fetched since the last comparison."""

    def __init__(self, rank: Rank) -> None:
        self._rank, self._shares = rank, model_parallel(rank.recipe) > 1
        self._seen: Counter[str] = Counter()
        self._number = 0.0

    def look(self, batch: Any, phase: str) -> None:
        """Add a micro-batch in host memory."""
        if not self._shares or self._seen[phase] == COMPARED:
            return
        self._seen[phase] += 1
        self._number += number_of(batch)

    def difference(self) -> float:
        """Return a number that `Rank.add_up` sums to zero if the ranks fetched the same, and start again."""
        number, self._number = self._number, 0.0
        return self._rank.difference_in_copy(number) if self._shares else 0.0


def number_of(batch: Any) -> float:
    """Return a number that changes little by rounding, and much by other values or another order."""
    numbers = map(_number_of_leaf, tree_leaves(batch))
    return sum((place * math.asinh(number) for place, number in enumerate(numbers, start=1)), start=0.0)


@torch.no_grad()
def _number_of_leaf(leaf: Any) -> float:
    """Return a sum of the values of a tensor, an array or a number, each times a random number. 0 for
    anything else: a text may be the path of a sample, which differs between nodes."""
    tensor = _as_tensor(leaf)
    if tensor is None or tensor.layout is not torch.strided or tensor.is_nested:
        return 0.0
    values = (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).reshape(-1)
    sums = []
    for part in torch.split(values, ROW * ROWS):
        rows = torch.zeros(-(-len(part) // ROW), ROW, dtype=torch.float64)
        rows.view(-1)[: len(part)].copy_(part)
        sums.append(rows.nan_to_num_(0.0, 0.0, 0.0) @ _factors(ROW, seed=0))
    total = torch.cat(sums) if sums else torch.zeros(0, dtype=torch.float64)
    return float(total @ _factors(len(total), seed=1))


def _as_tensor(leaf: Any) -> torch.Tensor | None:
    if isinstance(leaf, torch.Tensor):
        return leaf
    if isinstance(leaf, (int, float)):
        return torch.tensor(float(leaf), dtype=torch.float64)
    if numpy is not None and isinstance(leaf, numpy.ndarray) and leaf.dtype.kind in "biufc":
        return torch.from_numpy(leaf.copy())
    return None


def _factors(count: int, seed: int) -> torch.Tensor:
    """Return numbers between -1 and 1, the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, generator=generator, dtype=torch.float64) * 2 - 1

"""Finds data that differ between ranks that share a copy of the model.

Tensor-parallel ranks and the stages of a pipeline fetch the same samples, each by itself. A dataset with
random numbers that launcher does not seed gives each rank other samples: the last stage would compare the
output for one input with the target of another one.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from launcher.spec.mesh import model_parallel
from launcher.train.rank import Rank

COMPARED = 16
"Number of micro-batches of training, and of evaluation, that the ranks compare in an attempt."
APART = 1e-3
"Difference of two ranks' numbers that is no rounding, as between processors of two types."
DIFFERENT = (
    "the ranks that share a copy of the model got different samples: data() or collate() of the task draws "
    "random numbers that launcher does not seed (such as numpy.random.default_rng() or os.urandom), or "
    "depends on the rank. Use the global generators of torch, random or numpy, which are seeded for each "
    "sample, or seed by the sample's index"
)


class SameSamples:
    """A number for what this rank has fetched since the ranks compared it."""

    def __init__(self, rank: Rank) -> None:
        self._rank, self._shares = rank, model_parallel(rank.recipe) > 1
        self._seen: Counter[str] = Counter()
        self._number = 0.0

    def look(self, batch: Any, phase: str) -> None:
        """Take a micro-batch in host memory into account."""
        if not self._shares or self._seen[phase] == COMPARED:
            return
        self._seen[phase] += 1
        self._number += sum(map(_number, tree_leaves(batch)))

    def apart(self) -> float:
        """Return a number of which `Rank.add_up` makes zero if the ranks fetched the same, and begin anew."""
        number, self._number = self._number, 0.0
        return self._rank.within_copies(number)


@torch.no_grad()
def _number(leaf: Any) -> float:
    """Return a number that rounding changes little, and other values much, whatever their size. 0 for what is
    no plain tensor."""
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
        return 0.0
    values = (torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf).reshape(-1)
    # If all values are positive, a sum with one sign would hide the difference.
    found = float(values[::2].sum(dtype=torch.float64) - values[1::2].sum(dtype=torch.float64))
    return math.asinh(found) if math.isfinite(found) else 0.0

"""Which samples make each optimizer step: a pure function of the seed, the epoch and the step.

Micro-batch, accumulation and attempt have no part in it, so the same samples make the same step after a
downgrade, and a resumed run needs to know nothing but its step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from launcher.spec.job import Job
from launcher.spec.recipe import Recipe
from launcher.train.rank import SetupError

Collate = Callable[[list[Any]], Any]


def derive_seed(*parts: int | str) -> int:
    """A seed of 63 bits; different parts give unrelated streams."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def to_device(batch: Any, device: torch.device) -> Any:
    """Every tensor in nested lists, tuples and dicts."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)


class Order:
    """The order of `samples` samples in steps of `batch` samples each. The incomplete rest is left out."""

    def __init__(self, samples: int, batch: int, seed: int) -> None:
        if samples < batch:
            raise SetupError(f"the training data has {samples} samples, but batch.global is {batch}")
        self.samples, self.batch, self.seed = samples, batch, seed
        self.steps_per_epoch = samples // batch
        self._epoch = -1
        self._shuffled = torch.empty(0, dtype=torch.int64)

    @property
    def left_out(self) -> int:
        """Samples at the end of each epoch that do not fill a step; other ones in each epoch."""
        return self.samples - self.steps_per_epoch * self.batch

    def step(self, step: int) -> list[int]:
        """The `batch` indices of the `step`-th step, counted from 1."""
        epoch, position = divmod(step - 1, self.steps_per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(derive_seed("order", self.seed, epoch))
            self._shuffled, self._epoch = torch.randperm(self.samples, generator=generator), epoch
        start = position * self.batch
        return [int(index) for index in self._shuffled[start : start + self.batch].tolist()]


class TrainingData:
    """The micro-batches of this rank, step by step."""

    def __init__(self, data: Any, collate: Collate, job: Job, recipe: Recipe, rank: int, world: int) -> None:
        batch = job.batch.global_
        if recipe.micro_batch_size * recipe.grad_accum * world != batch:
            raise SetupError(
                f"micro_batch_size {recipe.micro_batch_size} x grad_accum {recipe.grad_accum} "
                f"x {world} ranks is not batch.global {batch}"
            )
        self.data, self.collate = data, collate
        self.order = Order(_length(data), batch, job.train.seed)
        self.micro = recipe.micro_batch_size
        self.share = slice(rank * batch // world, (rank + 1) * batch // world)

    def micro_batches(self, step: int) -> Iterator[Any]:
        """Collated on the CPU, one after the other, of the contiguous part that is this rank's."""
        mine = self.order.step(step)[self.share]
        for start in range(0, len(mine), self.micro):
            yield self.collate([self.data[index] for index in mine[start : start + self.micro]])


class EvaluationData:
    """The held-out data, each sample once, in the same number of batches on every rank."""

    def __init__(self, data: Any, collate: Collate, micro: int, rank: int, world: int) -> None:
        self.data, self.collate, self.micro, self.rank, self.world = data, collate, micro, rank, world
        self.samples = _length(data)
        if self.samples == 0:
            raise SetupError("the evaluation data is empty")

    def batches(self) -> Iterator[tuple[Any, bool]]:
        """`(batch, counts)`. A rank without samples left repeats one that does not count:
        with FSDP a forward pass is a collective, and every rank must take part."""
        for start in range(0, self.samples, self.micro * self.world):
            first = start + self.rank * self.micro
            indices = range(first, min(first + self.micro, self.samples))
            yield self.collate([self.data[index] for index in indices or (0,)]), len(indices) > 0


def _length(data: Any) -> int:
    try:
        return len(data)
    except TypeError:
        raise SetupError(
            f"{type(data).__name__} has no length; data() must return a map-style dataset (len and [index])"
        ) from None

"""Which samples make each optimizer step: a pure function of the seed, the epoch and the step.

Micro-batch, accumulation and attempt have no part in it, so the same samples make the same step after a
downgrade, and a resumed run needs to know nothing but its step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from launcher.spec.job import Job
from launcher.spec.recipe import Recipe
from launcher.train.loading import Collate, Loader, Ticket
from launcher.train.rank import SetupError
from launcher.train.seeds import derive_seed


def to_device(batch: Any, device: torch.device) -> Any:
    """Every tensor in nested lists, tuples and dicts.

    Pinned here and not by the DataLoader, which would start CUDA on the first GPU before the rank has taken
    its own; from memory that is not pinned a copy waits for all work that the GPU has been given.
    """

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if device.type == "cuda" and tensor.device.type == "cpu":
            tensor = tensor.pin_memory()
        return tensor.to(device, non_blocking=True)

    return tree_map_only(torch.Tensor, move, batch)


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
        self.order = Order(_length(data), batch, job.train.seed)
        self.micro, self.accumulation = recipe.micro_batch_size, recipe.grad_accum
        self.share = slice(rank * batch // world, (rank + 1) * batch // world)
        self._loader = Loader(data, collate, job.train.seed, workers=job.train.workers)
        self._arriving: Iterator[Any] = iter(())
        self._next = 0

    def start(self, step: int) -> None:
        """Make ready for `step`: with workers, fork them and let them begin."""
        self._arriving, self._next = self._loader.start(self._tickets(step)), step

    def change(self, recipe: Recipe) -> None:
        """The same samples in other micro-batches, from the next step that is asked for."""
        self.micro, self.accumulation = recipe.micro_batch_size, recipe.grad_accum
        self._arriving, self._next = iter(()), 0

    def micro_batches(self, step: int) -> Iterator[Any]:
        """Collated on the CPU, one after the other, of the contiguous part that is this rank's.

        Steps in their order are fetched ahead; any other step starts the workers anew.
        """
        if step != self._next:
            self.start(step)
        self._next = step + 1
        yield from itertools.islice(self._arriving, self.accumulation)

    @property
    def dataset(self) -> Any:
        return self._loader.samples.data

    def samples(self, step: int, index: int) -> list[Any]:
        """Of the `index`-th micro-batch of a step, both counted from 1, one by one."""
        tickets = next(itertools.islice(self._tickets(step), index - 1, None))
        return [self._loader.samples[ticket] for ticket in tickets]

    def _tickets(self, step: int) -> Iterator[list[Ticket]]:
        for step_ in itertools.count(step):
            first = (step_ - 1) * self.order.batch
            tickets = [(first + place, index) for place, index in enumerate(self.order.step(step_))]
            mine = tickets[self.share]
            for start in range(0, len(mine), self.micro):
                yield mine[start : start + self.micro]


class EvaluationData:
    """The held-out data, each sample once, in the same number of batches on every rank.

    Fetched in this process: workers for it would have to wait from the beginning of the training.
    """

    def __init__(self, data: Any, collate: Collate, micro: int, rank: int, world: int) -> None:
        self.micro, self.rank, self.world = micro, rank, world
        self.samples = _length(data)
        if self.samples == 0:
            raise SetupError("the evaluation data is empty")
        self._loader = Loader(data, collate, seed=0, workers=0)

    def batches(self) -> Iterator[tuple[Any, bool]]:
        """`(batch, counts)`. A rank without samples left repeats one that does not count:
        with FSDP a forward pass is a collective, and every rank must take part."""
        shares = list(self._shares())
        fetched = self._loader.start([[(index, index) for index in share or (0,)] for share in shares])
        for batch, share in zip(fetched, shares, strict=True):
            yield batch, len(share) > 0

    def _shares(self) -> Iterator[range]:
        for start in range(0, self.samples, self.micro * self.world):
            first = start + self.rank * self.micro
            yield range(first, max(first, min(first + self.micro, self.samples)))


def _length(data: Any) -> int:
    try:
        return len(data)
    except TypeError:
        raise SetupError(
            f"{type(data).__name__} has no length; data() must return a map-style dataset (len and [index])"
        ) from None

"""The samples of each optimizer step: a pure function of the seed, the epoch and the step.

They do not depend on micro-batch, accumulation or attempt, so a step has the same samples after a downgrade,
and a resumed run needs only its step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

from launcher.spec.job import Job
from launcher.spec.recipe import Recipe
from launcher.train.data.loading import Collate, Loader, Ticket
from launcher.train.rank import SetupError
from launcher.train.seeds import derive_seed
from launcher.train.task import samples_in


def to_device(batch: Any, device: torch.device) -> Any:
    """Move every tensor in nested lists, tuples, dicts and dataclasses to `device`, and on a GPU every object
    with a method `to`, such as a PackedSequence, transformers' BatchEncoding or a graph.

    Tensors are pinned here, because the DataLoader would start CUDA on the first GPU before the rank has
    chosen its own. A copy from memory that is not pinned waits for all work queued on the GPU.
    """

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if device.type == "cuda" and leaf.device.type == "cpu":
                leaf = leaf.pin_memory()
            return leaf.to(device, non_blocking=True)
        if moves_itself(leaf):
            return leaf.to(device)
        if is_dataclass(leaf) and not isinstance(leaf, type):
            moved = copy(leaf)
            for field in fields(leaf):
                object.__setattr__(moved, field.name, to_device(getattr(leaf, field.name), device))
            return moved
        return leaf

    def moves_itself(part: Any) -> bool:
        return device.type != "cpu" and callable(getattr(part, "to", None))

    return move(batch) if isinstance(batch, torch.Tensor) else tree_map(move, batch, is_leaf=moves_itself)


MOST_LISTED = 2**26
"Maximum number of samples whose order is kept in memory: 0.5 GiB per rank, which take seconds in each epoch."


class Order:
    """The order of `samples` samples in steps of `batch` samples each. An incomplete last step is skipped."""

    def __init__(self, samples: int, batch: int, seed: int) -> None:
        if samples < batch:
            raise SetupError(f"the training data has {samples} samples, but batch.global is {batch}")
        self.samples, self.batch, self.seed = samples, batch, seed
        self.steps_per_epoch = samples // batch
        self._epoch = -1
        self._shuffled = torch.empty(0, dtype=torch.int64)

    @property
    def left_out(self) -> int:
        """Number of samples that an epoch skips because they do not fill a step; they differ by epoch."""
        return self.samples - self.steps_per_epoch * self.batch

    def step(self, step: int) -> list[int]:
        """Return the `batch` indices of `step`, counted from 1."""
        epoch, position = divmod(step - 1, self.steps_per_epoch)
        start = position * self.batch
        if self.samples > MOST_LISTED:
            return shuffled(range(start, start + self.batch), self.samples, self._seed_of(epoch))
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed_of(epoch))
            self._shuffled, self._epoch = torch.randperm(self.samples, generator=generator), epoch
        indices: list[int] = self._shuffled[start : start + self.batch].tolist()
        return indices

    def _seed_of(self, epoch: int) -> int:
        return derive_seed("order", self.seed, epoch)


ROUNDS = 6
"Rounds of the network; four are the least that look random (Luby and Rackoff 1988)."


def shuffled(places: range, count: int, seed: int) -> list[int]:
    """Return the numbers at `places` of a shuffled `range(count)`, without making the rest of it.

    A Feistel network permutes all numbers below a power of four. Results that are not below `count` are
    permuted again until they are (Black and Rogaway 2002, "Ciphers with arbitrary finite domains").
    """
    bits = -(-(count - 1).bit_length() // 2)
    mask = 2**bits - 1
    keys = [derive_seed("round", seed, number) for number in range(ROUNDS)]

    def permuted(numbers: torch.Tensor) -> torch.Tensor:
        left, right = numbers >> bits, numbers & mask
        for key in keys:
            mixed = (right ^ key) * 0x1E3779B97F4A7C15  # modulo 2^64
            mixed = (mixed ^ (mixed >> 29)) * 0x3F58476D1CE4E5B9
            left, right = right, left ^ ((mixed ^ (mixed >> 32)) & mask)
        whole: torch.Tensor = (left << bits) | right
        return whole

    found = permuted(torch.arange(places.start, places.stop))
    while (outside := (found < 0) | (found >= count)).any():
        found[outside] = permuted(found[outside])
    return [int(number) for number in found.tolist()]


class TrainingData:
    """The micro-batches of this rank in each step."""

    def __init__(self, data: Any, collate: Collate, job: Job, recipe: Recipe, rank: int, world: int) -> None:
        batch = job.batch.global_
        if recipe.micro_batch_size * recipe.grad_accum * world != batch:
            raise SetupError(
                f"micro_batch_size {recipe.micro_batch_size} x grad_accum {recipe.grad_accum} "
                f"x {world} data-parallel ranks is not batch.global {batch}"
            )
        self.order = Order(samples_in(data), batch, job.train.seed)
        self.micro, self.accumulation = recipe.micro_batch_size, recipe.grad_accum
        self.share = slice(rank * batch // world, (rank + 1) * batch // world)
        self._loader = Loader("train", data, collate, job.train.seed, workers=job.train.workers)
        self._arriving: Iterator[Any] = iter(())
        self._next = 0

    def start(self, step: int) -> None:
        """Prepare for `step`. Workers, if any, are forked and begin to fetch."""
        self._arriving, self._next = self._loader.start(self._tickets(step)), step

    def change(self, recipe: Recipe) -> None:
        """Use the micro-batches of `recipe` from the next requested step; the samples stay the same."""
        self.micro, self.accumulation = recipe.micro_batch_size, recipe.grad_accum
        self._arriving, self._next = iter(()), 0

    def micro_batches(self, step: int) -> Iterator[Any]:
        """Yield the collated micro-batches of this rank's contiguous part of the step, on the CPU.

        Consecutive steps are fetched ahead; any other step lets the workers begin anew.
        """
        if step != self._next:
            self.start(step)
        self._next = step + 1
        for _ in range(self.accumulation):
            yield next(self._arriving)  # if there is none, Python raises RuntimeError

    @property
    def dataset(self) -> Any:
        return self._loader.data

    def samples(self, step: int, index: int) -> list[Any]:
        """Return the samples of micro-batch `index` of a step, not collated; both count from 1."""
        return self._loader.samples(next(itertools.islice(self._tickets(step), index - 1, None)))

    def first_sample(self, step: int) -> Any:
        """Return the first sample of a step, whichever rank has it."""
        [sample] = self._loader.samples([((step - 1) * self.order.batch, self.order.step(step)[0])])
        return sample

    def _tickets(self, step: int) -> Iterator[list[Ticket]]:
        for step_ in itertools.count(step):
            first = (step_ - 1) * self.order.batch
            tickets = [(first + position, index) for position, index in enumerate(self.order.step(step_))]
            share = tickets[self.share]
            for start in range(0, len(share), self.micro):
                yield share[start : start + self.micro]


class EvaluationData:
    """The held-out data, each sample once, in the same number of batches on every rank.

    Samples are fetched in this process: workers would have to be forked at the start and then wait.
    """

    def __init__(self, data: Any, collate: Collate, micro: int, rank: int, world: int) -> None:
        self.micro, self.rank, self.world = micro, rank, world
        self.samples = samples_in(data)
        if self.samples == 0:
            raise SetupError("the evaluation data is empty")
        self._loader = Loader("eval", data, collate, seed=0, workers=0)

    def batches(self) -> Iterator[tuple[Any, bool]]:
        """Yield `(batch, counts)`. A rank without samples left repeats one, with `counts` False: with FSDP a
        forward pass is a collective, and every rank must take part."""
        shares = list(self._shares())
        fetched = self._loader.start([[(index, index) for index in share or (0,)] for share in shares])
        for batch, share in zip(fetched, shares, strict=True):
            yield batch, len(share) > 0

    def _shares(self) -> Iterator[range]:
        for start in range(0, self.samples, self.micro * self.world):
            first = start + self.rank * self.micro
            yield range(first, max(first, min(first + self.micro, self.samples)))

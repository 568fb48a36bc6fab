"""Fetch samples in this process or in worker processes, with the same result.

The random state is seeded before each sample, from the sample's position in the training. Augmentation thus
does not depend on the worker, the rank, the micro-batch or the attempt, and a resumed run needs no loader
state. Before `collate` the random state is seeded from the position of the first sample, so random numbers in
`collate` do depend on the micro-batch.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from launcher.spec.errors import described
from launcher.spec.signals import LEFT_TO_SUPERVISOR
from launcher.train.rng import random_state, seed_host, set_rng_state
from launcher.train.seeds import derive_seed
from launcher.train.task import Split, Task

HOST = torch.device("cpu")
PR_SET_PDEATHSIG = 1
"Option of prctl(2), from <linux/prctl.h>: the signal that a process gets when its parent ends."

Collate = Callable[[list[Any]], Any]
Ticket = tuple[int, int]
"(position of the sample in the training, index in the dataset)"


class SampleError(Exception):
    """A sample could not be fetched. The message names its index and what the dataset raised."""


class Loader:
    """Makes collated batches of a map-style dataset, `data(split)` of the task, from lists of tickets.

    `start()` forks `workers` processes, so nothing has to be picklable. Call it before the first call to
    CUDA; otherwise a worker that uses CUDA raises "Cannot re-initialize CUDA in forked subprocess".
    """

    def __init__(self, split: Split, data: Any, collate: Collate, seed: int, *, workers: int) -> None:
        self._random = _HostRandomState()
        self.data, self._seed = data, seed
        self._samples = _Samples(split, data, seed, self._random)
        self._collate, self._workers = collate, workers
        self._batches = _Batches()
        self._loader: DataLoader[Any] | None = None
        self._collates_by_default = getattr(collate, "__func__", collate) in (Task.collate, default_collate)

    def start(self, batches: Iterable[list[Ticket]]) -> Iterator[Any]:
        """Return an iterator with one batch per list, in order. Each worker fetches two batches ahead.

        The first call forks the workers. A later one uses them again and ends the earlier iterator: workers
        that are forked later would share files with this process, which reads samples, too.
        """
        if not self._workers:
            return self._checked(map(self._collated, map(self._samples.__getitems__, batches)))
        self._batches.now = batches
        if self._loader is not None:
            return self._checked(iter(self._loader))
        self._loader = DataLoader(
            self._samples,
            batch_sampler=self._batches,
            collate_fn=self._collated,
            num_workers=self._workers,
            persistent_workers=True,
            multiprocessing_context="fork",
            worker_init_fn=_initialise_worker,
            generator=torch.Generator(),  # the default would draw a seed from the training's random state
        )
        before = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_SUPERVISOR)  # inherited by the workers
        try:
            return self._checked(iter(self._loader))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def samples(self, tickets: list[Ticket]) -> list[Any]:
        """Return samples, not collated, without a change of this process's random state."""
        try:
            return [self._samples[ticket] for ticket in tickets]
        finally:
            self._random.restore()

    def _collated(self, fetched: Any) -> Any:
        """Collate what `_Samples.__getitems__` returned."""
        if isinstance(fetched, _Raised):
            return fetched
        position, samples = fetched
        if not (self._collates_by_default and _draws_nothing(samples)):
            self._random.seed(derive_seed("batch", self._seed, position))
        return self._collate(samples)

    def _checked(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield batches without a change of this process's random state. Raises SampleError, for a worker,
        too.

        A suspended generator would keep its last batch alive, so the list gives up its reference before
        `yield`.
        """
        held = []
        while True:
            try:
                held.append(next(batches))
            except StopIteration:
                return
            finally:
                self._random.restore()
            if isinstance(held[0], _Raised):
                raise SampleError(held[0].text)
            yield held.pop()


class _Batches:
    """The lists of tickets of the latest call of `start`, which the DataLoader reads again each time."""

    now: Iterable[list[Ticket]] = ()

    def __iter__(self) -> Iterator[list[Ticket]]:
        return iter(self.now)


def _initialise_worker(_: int) -> None:
    """Make a worker end only at a SIGTERM from its rank, and at once when its rank ends.

    Without this, a stop request to the whole run would end the workers while the run still needs them to
    finish its step. torch notices the end of the rank after seconds, in which the worker holds pipes and
    memory.
    """
    threading.Thread(target=_end_on_sigterm_of_rank, daemon=True).start()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    rank = multiprocessing.parent_process()
    if rank is None or os.getppid() != rank.pid:  # the rank ended before the call to prctl
        os._exit(1)


def _end_on_sigterm_of_rank() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


@dataclass(frozen=True)
class _Raised:
    """A worker's error, returned in place of a batch: torch would raise it with another first line."""

    text: str


class _Samples(Dataset[Any]):
    def __init__(self, split: Split, data: Any, seed: int, random: _HostRandomState) -> None:
        self.split, self.data, self.seed, self._random = split, data, seed, random
        # Indexing these types draws no random numbers, and seeding 16 samples takes 0.2 ms. Their subclasses
        # may draw.
        self.draws = type(data) not in (list, tuple, torch.Tensor)

    def __getitem__(self, ticket: Ticket) -> Any:
        position, index = ticket
        if self.draws:
            self._random.seed(derive_seed("sample", self.seed, position))
        try:
            return self.data[index]
        except Exception as error:  # a StopIteration would end the step with fewer samples
            raise SampleError(f'sample {index} of data("{self.split}") raised {described(error)}') from error

    def __getitems__(self, tickets: list[Ticket]) -> tuple[int, list[Any]] | _Raised:
        """Return (position of the first sample, all samples); the DataLoader calls this."""
        try:
            return tickets[0][0], [self[ticket] for ticket in tickets]
        except SampleError as error:
            if get_worker_info() is None:
                raise
            trace = "".join(traceback.format_exception(error.__cause__))
            return _Raised(f"{error}\nIn a DataLoader worker:\n{trace}")


class _HostRandomState:
    """The CPU's random state while samples are fetched. Training's own is restored: dropout uses it."""

    def __init__(self) -> None:
        self._training_state: dict[str, Any] | None = None

    def seed(self, seed: int) -> None:
        """Seed all generators. torch.manual_seed would also queue a CUDA call for every sample."""
        if self._training_state is None:
            self._training_state = random_state(HOST)
        seed_host(seed)

    def restore(self) -> None:
        """Restore the state from before the first `seed`."""
        if self._training_state is not None:
            set_rng_state(self._training_state, HOST)
            self._training_state = None


def _draws_nothing(value: Any) -> bool:
    """Return whether `default_collate` of such samples draws no random numbers. Other types may draw."""
    cls = type(value)
    if cls is dict:
        return all(map(_draws_nothing, value.values()))
    return cls in (torch.Tensor, int, float, str) or (
        cls in (list, tuple) and all(map(_draws_nothing, value))
    )

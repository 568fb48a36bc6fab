"""Fetching samples, in this process or in worker processes, with the same result.

Before each sample the random state is seeded from the sample's place in the training: augmentation does not
depend on the worker, the rank, the micro-batch or the attempt, and a resumed run needs no loader state.
Before samples are collated it is seeded from the place of the first: what `collate` draws follows the
micro-batch.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from launcher.train.rng import numpy
from launcher.train.seeds import derive_seed

PR_SET_PDEATHSIG = 1
"Of <linux/prctl.h>: the signal that a process gets when its parent dies."

Collate = Callable[[list[Any]], Any]
Ticket = tuple[int, int]
"(place of the sample in the stream, index in the dataset)"


class Loader:
    """Collated batches of a map-style dataset, for lists of tickets.

    `workers` processes are forked by `start()`: nothing has to be picklable, but CUDA must not have been
    touched, or a worker that does would raise "Cannot re-initialize CUDA in forked subprocess".
    """

    def __init__(self, data: Any, collate: Collate, seed: int, *, workers: int) -> None:
        self.samples = _Samples(data, seed)
        self._collate, self._workers = collate, workers

    def start(self, batches: Iterable[list[Ticket]]) -> Iterator[Any]:
        """One batch for each list, in order. With workers, two batches a worker are fetched ahead."""
        loader = DataLoader(
            self.samples,
            batch_sampler=batches,
            collate_fn=self._collated,
            num_workers=self._workers,
            multiprocessing_context="fork" if self._workers else None,
            worker_init_fn=_dies_with_its_rank if self._workers else None,
            generator=torch.Generator(),  # else it draws its seed from the training's own random state
        )
        if not self._workers:
            return _aside(iter(loader))
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # for them to inherit
        try:
            return iter(loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _collated(self, fetched: Any) -> Any:
        """What `_Samples` gives for a list of tickets."""
        place, samples = fetched
        _seed_host(derive_seed("batch", self.samples.seed, place))
        return self._collate(samples)


def _dies_with_its_rank(_: int) -> None:
    """Of SIGTERMs it heeds its rank's alone: torch's handler would end it where the whole run is to save.
    torch's watch for the rank's end takes seconds, in which a worker holds its pipes and its memory."""
    threading.Thread(target=_end_when_told, daemon=True).start()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:  # it was killed in between
        os._exit(1)


def _end_when_told() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


class _Samples(Dataset[Any]):
    def __init__(self, data: Any, seed: int) -> None:
        self.data, self.seed = data, seed
        # What lies there already draws nothing; seeding 16 samples costs a fifth of a millisecond. A subclass
        # may do anything.
        self.draws = type(data) not in (list, tuple, torch.Tensor)

    def __getitem__(self, ticket: Ticket) -> Any:
        place, index = ticket
        if self.draws:
            _seed_host(derive_seed("sample", self.seed, place))
        return self.data[index]

    def __getitems__(self, tickets: list[Ticket]) -> tuple[int, list[Any]]:
        """What the DataLoader asks for: (place of the first, all samples)."""
        return tickets[0][0], [self[ticket] for ticket in tickets]


def _seed_host(seed: int) -> None:
    """Not torch.manual_seed: it would queue a call for CUDA with every sample."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def _aside(batches: Iterator[Any]) -> Iterator[Any]:
    """In this process, whose random state is dropout's as well. A generator that waits would keep its last
    batch alive: it hands it out of its hands."""
    held = []
    while True:
        with _kept_random_state():
            try:
                held.append(next(batches))
            except StopIteration:
                return
        yield held.pop()


@contextmanager
def _kept_random_state() -> Iterator[None]:
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    numpy_state = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)

"""Fetch samples in this process or in worker processes, with the same result.

The random state is seeded before each sample, from the sample's position in the training. Augmentation thus
does not depend on the worker, the rank, the micro-batch or the attempt, and a resumed run needs no loader
state. Before `collate` the random state is seeded from the position of the first sample, so random numbers in
`collate` do depend on the micro-batch.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from launcher.spec.errors import described
from launcher.spec.signals import LEFT_TO_SUPERVISOR
from launcher.train.end_with_parent import end_with_parent
from launcher.train.rng import random_state, seed_host, set_rng_state
from launcher.train.seeds import derive_seed
from launcher.train.task import Split, Task

HOST = torch.device("cpu")
ENDING_SECONDS = 1.0
"Maximum time between the first sign that a worker ends, such as a closed connection, and its end."

MAX_NAMED = 16
"Number of samples that an error names."

Collate = Callable[[list[Any]], Any]
Ticket = tuple[int, int]
"(position of the sample in the training, index in the dataset)"


class SampleError(Exception):
    """Samples could not be fetched or collated. The message names their indices and what was raised."""


class WorkerError(RuntimeError):
    """A worker was ended by a signal. The message has the words of torch's own."""


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
        self._processes: list[multiprocessing.process.BaseProcess] = []
        "The workers."
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
        others = multiprocessing.active_children()
        with _signals_of_workers():
            batches_of_workers = iter(self._loader)
        self._processes = [child for child in multiprocessing.active_children() if child not in others]
        return self._checked(batches_of_workers)

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
        tickets, samples = fetched
        if not (self._collates_by_default and _draws_nothing(samples)):
            self._random.seed(derive_seed("batch", self._seed, tickets[0][0]))
        try:
            return self._collate(samples)
        except (Exception, SystemExit) as error:
            indices = ", ".join(str(index) for _, index in tickets[:MAX_NAMED])
            more = f" and {len(tickets) - MAX_NAMED} more" if len(tickets) > MAX_NAMED else ""
            what = f'collate() of samples {indices}{more} of data("{self._samples.split}")'
            return _raised(SampleError(f"{what} raised {described(error)}"), error)

    def _checked(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield batches without a change of this process's random state. Raises SampleError, for a worker,
        too, and WorkerError.

        A suspended generator would keep its last batch alive, so the list gives up its reference before
        `yield`.
        """
        held = []
        while True:
            try:
                held.append(next(batches))
            except StopIteration:
                return
            except Exception:
                if self._processes and (ended := self._ended_worker()) is not None:
                    raise ended from None
                raise
            finally:
                self._random.restore()
            if isinstance(held[0], _Raised):
                raise SampleError(held[0].text)
            yield held.pop()

    def _ended_worker(self) -> Exception | None:
        """Return what to raise for a worker that has ended, or None if none has.

        Its end shows in different ways: torch notices it after seconds, and a batch that the worker had sent
        cannot be received any more.
        """
        ended = wait([process.sentinel for process in self._processes], ENDING_SECONDS)
        for process in self._processes:
            if process.sentinel not in ended:
                continue
            process.join()
            code = process.exitcode or 0
            if code < 0:
                what = f"DataLoader worker (pid {process.pid}) is killed by signal"
                return WorkerError(f"{what}: {signal.strsignal(-code)}")
            return SampleError(
                f'a DataLoader worker that fetched samples of data("{self._samples.split}") ended with exit '
                f"code {code}: code of the dataset or of a library called os._exit() or exit()"
            )
        return None


class _Batches:
    """The lists of tickets of the latest call of `start`, which the DataLoader reads again each time."""

    now: Iterable[list[Ticket]] = ()

    def __iter__(self) -> Iterator[list[Ticket]]:
        return iter(self.now)


@contextmanager
def _signals_of_workers() -> Iterator[None]:
    """Fork workers in this block with their own handling of signals. Leave that of this process as it was.

    torch adds a handler of SIGCHLD, which raises an exception wherever this process is when a worker fails:
    in the optimizer, or in a checkpoint. Without it, the exception comes when the samples are missing.
    """
    child, prints_crashes = signal.getsignal(signal.SIGCHLD), faulthandler.is_enabled()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_SUPERVISOR)  # inherited by the workers
    faulthandler.disable()  # a worker enables it again, over torch's handlers
    try:
        yield
    finally:
        if prints_crashes:
            print_crashes()
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if child is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, child)


def print_crashes() -> None:
    """Let this process print where its Python code was if it crashes, as by a segmentation fault."""
    faulthandler.enable(2, all_threads=False)


def _initialise_worker(_: int) -> None:
    """Make a worker end only at a SIGTERM from its rank, and at once when its rank ends.

    Without this, a stop request to the whole run would end the workers while the run still needs them to
    finish its step. torch notices the end of the rank after seconds, in which the worker holds pipes and
    memory.
    """
    print_crashes()
    threading.Thread(target=_end_on_sigterm_of_rank, daemon=True).start()
    end_with_parent()


def _end_on_sigterm_of_rank() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


@dataclass(frozen=True)
class _Raised:
    """A worker's error, returned in place of a batch: torch would raise it with another first line."""

    text: str


def _raised(error: SampleError, cause: BaseException | None) -> _Raised:
    """Return the error if this process is a worker, else raise it."""
    if get_worker_info() is None:
        raise error from cause
    trace = "".join(traceback.format_exception(cause))
    return _Raised(f"{error}\nIn a DataLoader worker:\n{trace}")


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
        # A StopIteration would end the step with fewer samples, and a SystemExit a worker without a trace.
        except (Exception, SystemExit) as error:
            raise SampleError(f'sample {index} of data("{self.split}") raised {described(error)}') from error

    def __getitems__(self, tickets: list[Ticket]) -> tuple[list[Ticket], list[Any]] | _Raised:
        """Return (tickets, samples); the DataLoader calls this."""
        try:
            return tickets, [self[ticket] for ticket in tickets]
        except SampleError as error:
            return _raised(error, error.__cause__)


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

"""Memory snapshots of this rank, written to a file on request and at an OOM.

On a GPU this is PyTorch's snapshot, which pytorch.org/memory_viz displays. With a memory budget on the CPU it
is a JSON file with the same purpose.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from launcher.rundir.files import read_record, replace_json
from launcher.rundir.time import now
from launcher.spec.events import MemorySnapshot
from launcher.train.cpu_memory_budget import Budget, Held, MemoryBudget
from launcher.train.largest_tensors import Moment, Piece, cuda_pieces, largest
from launcher.train.metrics.notes import Notes
from launcher.train.phase import Where
from launcher.train.rank import Rank

SECONDS_BETWEEN_LOOKS = 1.0
LOOKS_PER_SECOND = 100
"Limit for all ranks together, because they read a shared file."
MAX_ENTRIES = 100_000
"Number of newest allocations and frees that a GPU's history keeps; a few KB each, with stacks."


class CudaRecording:
    """PyTorch's own recording of a GPU's memory."""

    suffix = "pickle"

    def start(self) -> None:
        """Start to collect the history that a snapshot shows. This costs time."""
        torch.cuda.memory._record_memory_history(max_entries=MAX_ENTRIES, stacks="python", clear_history=True)

    def stop(self) -> None:
        torch.cuda.memory._record_memory_history(enabled=None)

    def dump(self, path: Path) -> None:
        """Write a snapshot to `path`. Raises OSError."""
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            torch.cuda.memory._dump_snapshot(str(temporary))  # type: ignore[no-untyped-call]
            temporary.replace(path)
        finally:  # after an error, such as a full disk, do not leave the file
            temporary.unlink(missing_ok=True)

    def on_oom(self, observer: Callable[..., None]) -> None:
        """Call `observer` at an OOM, before the exception unwinds the stack."""
        # Private, but PyTorch's guide to memory snapshots uses it. The observer is called with
        # (device, requested bytes, bytes that this process may use, bytes free on the device).
        torch._C._cuda_attach_out_of_memory_observer(observer)  # type: ignore[attr-defined]

    def moment(self, *arguments: int) -> Moment:
        """Return the state of memory at an OOM. `arguments`: of the observer."""
        _, requested, total, free = arguments
        return Moment(requested, total, free, largest(cuda_pieces()))


class BudgetRecording:
    """Records a memory budget. Equal storages of the same phase and step are one entry, largest first."""

    suffix = "json"

    def __init__(self, budget: MemoryBudget) -> None:
        self.budget = budget

    def start(self) -> None:
        self.budget.record(True)

    def stop(self) -> None:
        self.budget.record(False)

    def dump(self, path: Path) -> None:
        where = self.budget.where
        held = self.budget.contents()
        replace_json(
            path,
            {
                "time": now(),
                "phase": where.phase,
                "step": where.step,
                "limit": self.budget.limit,
                "bytes": sum(storage.size for storage in held),
                "storages": _grouped(held),
            },
        )

    def on_oom(self, observer: Callable[..., None]) -> None:
        self.budget.on_oom = observer

    def moment(self, *arguments: int) -> Moment:
        limit = self.budget.limit
        free = limit - self.budget.live if limit is not None else None
        return Moment(arguments[0], limit, free, largest(_pieces(self.budget.contents())))


Recording = CudaRecording | BudgetRecording


def _pieces(held: tuple[Held, ...]) -> Iterator[Piece]:
    for one in held:
        if (storage := one.reference()) is not None:
            yield Piece(storage._cdata, one.size, tuple(one.shape), one.dtype)


def _grouped(held: tuple[Held, ...]) -> list[dict[str, Any]]:
    groups = Counter(storage[:-1] for storage in held if storage.size)
    return [
        {
            "bytes": size * count,
            "count": count,
            "dtype": str(dtype).removeprefix("torch."),
            "shape": list(shape),
            "phase": phase,
            "step": step,
        }
        for (size, dtype, shape, phase, step), count in sorted(
            groups.items(), key=lambda entry: -entry[0][0] * entry[1]
        )
    ]


def recording_of(device: torch.device, budget: Budget) -> Recording | None:
    if device.type == "cuda":
        return CudaRecording()
    return BudgetRecording(budget) if isinstance(budget, MemoryBudget) else None


def watch_out_of_memory(rank: Rank, budget: Budget, where: Where) -> None:
    """At every OOM from now on, store the state of memory in `where` and write a snapshot.

    A later snapshot replaces an earlier one, because the last OOM is the fatal one. No snapshot is written
    while the probe still has a smaller recipe to try.
    """
    recording = recording_of(rank.device, budget)
    if recording is None:
        return
    path = rank.attempt.snapshot(rank.number, None, recording.suffix)

    def observer(*arguments: int) -> None:
        try:
            where.failed = recording.moment(*arguments)
            if where.trying:
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            recording.dump(path)
        except (OSError, RuntimeError) as error:  # do not hide the OOM itself
            print(f"no snapshot of the memory: {error}", flush=True)

    recording.on_oom(observer)
    if rank.job.train.record_memory:
        recording.start()


class Snapshots:
    """Answers `launcher snapshot`: records the step after the request and writes the snapshot."""

    def __init__(self, rank: Rank, budget: Budget, notes: Notes) -> None:
        self.rank, self.notes = rank, notes
        self.recording = recording_of(rank.device, budget)
        self._answered: dict[str, Any] = {}
        self._looked = float("-inf")
        self._pending = False

    def after_step(self, step: int) -> None:
        if self._pending and self.recording is not None:
            self._pending = False
            self._write(self.recording, step)
        elif self._asked():
            if self.recording is None:
                self.notes.line("no memory snapshot: the CPU needs a memory budget (TRAIN_MEMORY_BUDGET)")
                return
            self._pending = True
            if not self.rank.job.train.record_memory:
                self.recording.start()

    def _asked(self) -> bool:
        """Return True if there is a new request for this rank or for all ranks.

        The request file is read about once a second, less often on hundreds of ranks.
        """
        every = max(SECONDS_BETWEEN_LOOKS, self.rank.world / LOOKS_PER_SECOND)
        if time.monotonic() - self._looked < every:
            return False
        self._looked = time.monotonic()
        request = read_record(self.rank.attempt.snapshot_request)
        if not request or request == self._answered:
            return False
        self._answered = request
        return request.get("rank") in (None, self.rank.number)

    def _write(self, recording: Recording, step: int) -> None:
        path = self.rank.attempt.snapshot(self.rank.number, step, recording.suffix)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            recording.dump(path)
        except (OSError, RuntimeError) as error:
            self.notes.line(f"no memory snapshot: {error}")
            return
        finally:
            if not self.rank.job.train.record_memory:
                recording.stop()
        self.notes.line(f"memory snapshot of step {step}: {path}")
        self.notes.event(MemorySnapshot(rank=self.rank.number, step=step, path=str(path)))

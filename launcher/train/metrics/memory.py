"""Memory use of this rank, read once per step from host-side counters, without synchronisation."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from launcher.train.cpu_memory_budget import Budget, MemoryBudget


@dataclass(frozen=True)
class Reading:
    """A reading of memory counters, in bytes; None if the device does not have the counter."""

    rss: int
    "Host memory of this process."
    allocated: int | None = None
    "Tensors on the device, now."
    peak: int | None = None
    "Peak of tensors on the device since the last reading."
    reserved: int | None = None
    "Memory held by the caching allocator, now."
    num_alloc_retries: int | None = None
    "How often the allocator emptied its cache to satisfy a request, since the start."
    num_ooms: int | None = None

    def known(self) -> dict[str, int]:
        return {name: value for name, value in vars(self).items() if value is not None}


class CudaMeter:
    counts = True
    "Whether a reading has the tensors on the device, and their peak."

    def __init__(self, device: torch.device) -> None:
        self.device = device
        total = torch.cuda.get_device_properties(device).total_memory
        self.capacity: int | None = int(total * torch.cuda.get_per_process_memory_fraction(device))
        "Bytes that this rank may use on its device; None on a CPU without a budget."

    def read(self) -> Reading:
        """Return a reading and start a new peak."""
        # memory_allocated() and similar functions each build the whole memory_stats() table: read it once.
        stats: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return Reading(
            rss=_rss(),
            allocated=stats["allocated_bytes"]["all"]["current"],
            peak=stats["allocated_bytes"]["all"]["peak"],
            reserved=stats["reserved_bytes"]["all"]["current"],
            num_alloc_retries=stats["num_alloc_retries"],
            num_ooms=stats["num_ooms"],
        )

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Return whether a reading counts this storage."""
        return storage.device.type == "cuda"


class BudgetMeter:
    counts = True

    def __init__(self, budget: MemoryBudget) -> None:
        self.budget = budget
        self.capacity: int | None = budget.limit

    def read(self) -> Reading:
        return Reading(rss=_rss(), allocated=self.budget.live, peak=self.budget.take_peak())

    def holds(self, storage: torch.UntypedStorage) -> bool:
        return self.budget.counts(storage)


class HostMeter:
    capacity: int | None = None
    counts = False

    def read(self) -> Reading:
        return Reading(rss=_rss())

    def holds(self, storage: torch.UntypedStorage) -> bool:
        return False


Meter = CudaMeter | BudgetMeter | HostMeter


def open_meter(device: torch.device, budget: Budget) -> Meter:
    if device.type == "cuda":
        return CudaMeter(device)
    return BudgetMeter(budget) if isinstance(budget, MemoryBudget) else HostMeter()


_PAGE = os.sysconf("SC_PAGE_SIZE")


def _rss() -> int:
    """Return the host memory of this process, in bytes; see proc_pid_statm(5)."""
    return int(os.pread(_statm(os.getpid()), 256, 0).split()[1]) * _PAGE


@cache
def _statm(process: int) -> int:
    """Return the open file with the memory of this process: to open it takes ten times as long as to read
    it. A forked process opens its own. The path is of the process itself, because a container's /proc may
    number processes as the host does."""
    return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)

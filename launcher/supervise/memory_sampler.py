"""Record memory and utilization of a `command:` rank once a second. A `task:` rank records its own."""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from launcher.rundir.files import append_json
from launcher.rundir.time import now

SECONDS = 1.0
WRITES_PER_SECOND = 100
"Limit for all ranks together, because each write opens a file on the shared file system."

OnGpus = Callable[[set[int]], dict[str, int]]
"Maps process ids to their `used` and `utilization` on GPUs, or to {} if unknown."


class MemorySampler:
    """Appends lines to `memory/rank-003.jsonl` from a thread of its own until it is closed.

    `rss`: host memory of the rank's process and its descendants, in bytes; memory that they share counts
    once for each. `cpu`: the CPU time that they used since the last line, in percent of one core. If
    `nvidia-ml-py` is installed: `used`, their GPU memory in bytes, and `utilization`, the
    largest share of the time, in percent, in which one of their GPUs worked. If the disk is full, lines are
    lost.
    """

    def __init__(self, path: Path, pid: int, *, ranks: int, gpus: bool) -> None:
        self._path, self._pid = path, pid
        self._every = max(SECONDS, ranks / WRITES_PER_SECOND)
        self._on_gpus: OnGpus = _nvml() if gpus else _no_counters
        self._cpu_before: dict[int, float] = {}
        "Process -> seconds of CPU time at the last sample."
        self._read_at = time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        sample = 0
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
        while not self._closed.wait(self._every if sample else SECONDS / 10):
            sample += 1
            if (reading := self._read()) is not None:
                with contextlib.suppress(OSError):
                    append_json(self._path, {"time": now(), "sample": sample, **reading})

    def _read(self) -> dict[str, Any] | None:
        """Return the counters, or None if the rank has ended."""
        try:
            processes = [psutil.Process(self._pid), *psutil.Process(self._pid).children(recursive=True)]
        except psutil.Error:
            return None
        rss, cpu = 0, dict[int, float]()
        for process in processes:
            with contextlib.suppress(psutil.Error):  # just ended
                rss += process.memory_info().rss
                cpu[process.pid] = sum(process.cpu_times()[:2])  # user and system
        if not rss:
            return None
        busy = sum(max(0.0, spent - self._cpu_before.get(pid, 0.0)) for pid, spent in cpu.items())
        self._cpu_before, before, self._read_at = cpu, self._read_at, time.monotonic()
        share = round(100 * busy / max(self._read_at - before, 1e-3))
        return {"rss": rss, "cpu": share, **self._on_gpus({process.pid for process in processes})}


def _no_counters(pids: set[int]) -> dict[str, int]:
    return {}


def _nvml() -> OnGpus:
    """Return a function that queries NVML, or `_no_counters` if NVML cannot be used here."""
    try:
        pynvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return _no_counters
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return _no_counters

    def on_gpus(pids: set[int]) -> dict[str, int]:
        held, busy = [], [0]
        for handle in handles:
            with contextlib.suppress(pynvml.NVMLError):
                # In a container NVML may report other pids, and may not report memory.
                processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
                sizes = [process.usedGpuMemory for process in processes if process.pid in pids]
                held += [size for size in sizes if size is not None]
                if sizes:
                    busy.append(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        return {"used": sum(held), "utilization": max(busy)} if held else {}

    return on_gpus

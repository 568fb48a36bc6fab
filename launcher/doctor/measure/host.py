"""Measure a node's host: memory, limits, clock and installed versions."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import locale
import os
import platform
import re
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launcher.doctor.measure.guarded import guarded
from launcher.doctor.values import Measured
from launcher.rundir.host_memory import free_and_total, memory_limit
from launcher.rundir.versions import DISTRIBUTION, version_of

SHM = Path("/dev/shm")


def measure_host(node: int, run: Path) -> Iterator[Measured]:
    """Yield the host's values. `run` is the run directory, whose file times are compared with the clock."""
    yield guarded("host", node, socket.gethostname)
    yield guarded("cpus", node, lambda: len(os.sched_getaffinity(0)))
    yield guarded("load", node, lambda: {"load": os.getloadavg()[0], "cpus": os.cpu_count()})
    yield guarded("memory", node, memory_limit)
    yield guarded("free-memory", node, free_memory)
    yield guarded("shm", node, lambda: os.statvfs(SHM).f_blocks * os.statvfs(SHM).f_frsize)
    yield guarded("memlock", node, memlock)
    yield guarded("nofile", node, lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield guarded("stack", node, lambda: resource.getrlimit(resource.RLIMIT_STACK)[0])
    yield guarded("clock", node, lambda: clock_offset(run))
    yield guarded("encoding", node, lambda: locale.getpreferredencoding(False))
    yield guarded("python", node, platform.python_version)
    yield guarded("launcher", node, launcher_version)
    yield guarded("torch", node, torch_version)
    yield guarded("bitsandbytes", node, bitsandbytes_version)


def launcher_version() -> str:
    """Return the installed version, or "source" for a launcher that is only on PYTHONPATH."""
    return version_of(DISTRIBUTION) or "source"


def memlock() -> dict[str, Any]:
    """Return the limit of locked memory in bytes (-1 for none) and whether there is an InfiniBand adapter."""
    return {
        "bytes": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "infiniband": any(Path("/dev/infiniband").glob("uverbs*")),
    }


def free_memory() -> dict[str, int]:
    """Return the memory that this process may use, and how much of it is free, in bytes."""
    return {"limit": memory_limit(), "free": max(0, min(free for free, _ in free_and_total()))}


def clock_offset(folder: Path) -> float:
    """Return how many seconds this node's clock is ahead of the file times in a folder.

    On a network file system, the server sets these times. On a local disk, the kernel does.
    """
    file = folder / f".doctor-clock-{os.getpid()}-{os.urandom(4).hex()}"
    try:
        file.touch()
        return round(time.time() - file.stat().st_mtime, 3)
    finally:
        file.unlink(missing_ok=True)


def torch_version() -> dict[str, Any]:
    """Return torch's versions without importing it. Raises PackageNotFoundError.

    `torch`, `cuda` and `nccl` are versions, or "" if there is none. `misfits` lists NVIDIA's libraries whose
    installed version differs from the one torch was built with.
    """
    torch = importlib.metadata.version("torch")
    cuda = re.search(r"^cuda: .*= '([\d.]+)'", (_folder("torch") / "version.py").read_text(), re.M)
    required = "\n".join(importlib.metadata.requires("torch") or ())
    pinned = dict(re.findall(r"^(nvidia-[\w-]+)\s*==\s*([\w.]+)", required, re.M))
    # A library that is not installed may belong to another build or platform.
    installed = {name: version for name in pinned if (version := version_of(name))}
    other = {name: version for name, version in installed.items() if version != pinned[name]}
    return {
        "torch": torch,
        "cuda": cuda[1] if cuda else "",
        "nccl": next((version for name, version in installed.items() if name.startswith("nvidia-nccl-")), ""),
        "misfits": [f"{name} {version} instead of {pinned[name]}" for name, version in other.items()],
    }


def bitsandbytes_version() -> dict[str, Any]:
    """Return bitsandbytes' version, the CUDA versions that it was built for, and torch's CUDA version.

    Raises PackageNotFoundError.
    """
    version = importlib.metadata.version("bitsandbytes")
    names = " ".join(file.name for file in _folder("bitsandbytes").glob("libbitsandbytes_cuda*.so"))
    built = sorted((int(major), int(minor)) for major, minor in re.findall(r"_cuda(\d+)(\d)\.", names))
    return {
        "version": version,
        "cuda": [f"{major}.{minor}" for major, minor in built],
        "torch": torch_version()["cuda"],
    }


def _folder(package: str) -> Path:
    """Return the folder of an installed package without importing it."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent

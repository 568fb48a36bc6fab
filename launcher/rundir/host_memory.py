"""The host memory available to this process: that of the machine, or less in a cgroup with a limit."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def memory_limit() -> int:
    """Return the smallest of the machine's memory and the limits of this process's cgroups, in bytes."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for folder in cgroups():
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):  # "max" means no limit
                limits.append(int((folder / name).read_text()))
    return min(limits)


def free_and_total() -> Iterator[tuple[int, int]]:
    """Yield (free, total) in bytes for the machine, and for each of this process's cgroups with a limit."""
    host = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free, total = (int(host[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
    yield free, total
    for folder in cgroups():
        for limit, usage in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            try:
                total, used = (int((folder / name).read_text()) for name in (limit, usage))
                counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):  # the cgroup is of the other version, or has no limit ("max")
                continue
            # The kernel counts page cache as used, although it drops page cache first. Version 1 reports the
            # total with inner cgroups under another name.
            cache = counts.get("total_inactive_file", counts.get("inactive_file", 0))
            yield total - used + int(cache), total


def cgroups(root: Path = Path("/")) -> Iterator[Path]:
    """Yield the folders of this process's memory cgroups and of their parents, innermost first.

    In a container, the container's own cgroup may appear as the root.
    """
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                top = root / "sys/fs/cgroup"
            elif "memory" in controllers.split(","):
                top = root / "sys/fs/cgroup/memory"
            else:
                continue
            inner = Path(path.lstrip("/"))
            yield from (top / folder for folder in (inner, *inner.parents))

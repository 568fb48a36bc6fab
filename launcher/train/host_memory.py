"""Free host memory of this node, under the smallest of all limits. Used for handovers and copies."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from launcher.rundir.shared import MEMORY

KEPT_FREE = 0.05
"Fraction of each limit that stays free: for these ranks until they end, and for the next ones at start."


def free_for_handover() -> int:
    """Return the bytes that fit into shared memory now, given its file system, the host and the container."""
    if not MEMORY.is_dir():
        return 0
    usage = shutil.disk_usage(MEMORY)
    return max(0, min(usage.free - int(KEPT_FREE * usage.total), free_on_host()))


def free_on_host() -> int:
    """Return the bytes of host memory that are still free, given the host and the container's limit."""
    return max(0, min(free - int(KEPT_FREE * total) for free, total in _limits()))


def _limits() -> Iterator[tuple[int, int]]:
    """Yield (free, total) in bytes for the host and each control group with a limit."""
    host = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    yield tuple(int(host[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))  # type: ignore[misc]
    for folder, limit_name, used_name, cache_name in _cgroups():
        try:
            limit, used = int((folder / limit_name).read_text()), int((folder / used_name).read_text())
            counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # the group does not exist here, or has no limit ("max")
            continue
        # The kernel counts page cache as used, although it can be dropped.
        yield limit - used + int(counts.get(cache_name, 0)), limit


def _cgroups() -> Iterator[tuple[Path, str, str, str]]:
    """Yield this process's control group and its parents, for cgroup versions 1 and 2; each may have a limit.
    Each item is the folder and the names of limit, usage and page cache."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = Path("/sys/fs/cgroup"), ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = root / path.lstrip("/")
        for one in (folder, *folder.parents):
            if one == root or root in one.parents:
                yield one, *names

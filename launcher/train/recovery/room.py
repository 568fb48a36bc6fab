"""Whether this node has the memory to keep the state of its ranks for the next attempt."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from launcher.rundir.shared import MEMORY

KEPT_FREE = 0.05
"Of the smallest limit: for what the ranks need until they end, and the next ones at their start."


def free_for_handover() -> int:
    """Bytes that fit into shared memory now: of its file system, the host, and the container's limit."""
    if not MEMORY.is_dir():
        return 0
    usage = shutil.disk_usage(MEMORY)
    return max(0, min(usage.free - int(KEPT_FREE * usage.total), free_on_host()))


def free_on_host() -> int:
    """Bytes of host memory that this node can still give: of the host, and of the container's limit."""
    return max(0, min(free - int(KEPT_FREE * total) for free, total in _limits()))


def _limits() -> Iterator[tuple[int, int]]:
    """(free, in all) in bytes, of everything that limits host memory."""
    host = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    yield tuple(int(host[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))  # type: ignore[misc]
    for folder, limit_name, used_name, cache_name in _cgroups():
        try:
            limit, used = int((folder / limit_name).read_text()), int((folder / used_name).read_text())
            counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # no such group here, or no limit ("max")
            continue
        # Pages of files that can be dropped count as used.
        yield limit - used + int(counts.get(cache_name, 0)), limit


def _cgroups() -> Iterator[tuple[Path, str, str, str]]:
    """This process's control group and those above it: each may have a limit. Versions 1 and 2."""
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

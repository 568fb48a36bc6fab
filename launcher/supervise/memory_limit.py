"""The host memory available to this process: the limit of its cgroup or the machine's memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def memory_limit(root: Path = Path("/")) -> int:
    """Return the smallest of the machine's memory and the limits of this process's cgroups, in bytes."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for folder in cgroups(root):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):  # "max" means no limit
                limits.append(int((folder / name).read_text()))
    return min(limits)


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

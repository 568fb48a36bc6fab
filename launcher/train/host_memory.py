"""Free host memory of this node, under the smallest of all limits. Used for handovers and copies."""

from __future__ import annotations

import shutil

from launcher.rundir.host_memory import free_and_total
from launcher.rundir.shared_memory_folders import MEMORY

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
    return max(0, min(free - int(KEPT_FREE * total) for free, total in free_and_total()))

"""The CPUs that a rank may use: one list of `node.cpu_bind` for each rank of a node."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from launcher.spec import variables


def bind(environ: Mapping[str, str]) -> None:
    """Keep this process, and so the rank that it starts, on its CPUs.

    Where the job has none of them, it says so and leaves the process as it is.
    """
    lists = environ.get(variables.CPU_BIND, "").split()
    if not lists:
        return
    rank = int(environ.get("LOCAL_RANK", "0"))
    wanted = listed(lists[rank])
    allowed = os.sched_getaffinity(0)
    if not wanted & allowed:
        print(
            f"launcher: node.cpu_bind: rank {rank} of this node should have CPUs {lists[rank]}, and the job "
            "has none of them: it is not bound",
            file=sys.stderr,
        )
        return
    os.sched_setaffinity(0, wanted & allowed)


def listed(text: str) -> set[int]:
    """`0-3,8` -> {0, 1, 2, 3, 8}."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found

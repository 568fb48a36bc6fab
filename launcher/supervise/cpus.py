"""Bind a rank to its CPUs: `node.cpu_bind` has one list for each rank of a node."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from launcher.spec import variables


def bind(environ: Mapping[str, str]) -> None:
    """Bind this process, and so the rank that it starts, to its CPUs.

    If the job has none of these CPUs, print a message and change nothing.
    """
    lists = environ.get(variables.CPU_BIND, "").split()
    if not lists:
        return
    rank = int(environ.get("LOCAL_RANK", "0"))
    rank_cpus = listed(lists[rank])
    job_cpus = os.sched_getaffinity(0)
    if not rank_cpus & job_cpus:
        print(
            f"launcher: node.cpu_bind: rank {rank} of this node should have CPUs {lists[rank]}, but the job "
            "has none of them; the rank is not bound",
            file=sys.stderr,
        )
        return
    os.sched_setaffinity(0, rank_cpus & job_cpus)


def listed(text: str) -> set[int]:
    """Return the numbers in a CPU list: `0-3,8` -> {0, 1, 2, 3, 8}."""
    cpus: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus

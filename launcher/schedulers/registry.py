"""Map a cluster to its scheduler: launcher's own, and those that other packages register.

A package registers a scheduler as an entry point of the group `launcher.schedulers`. The entry point's name
is the `scheduler:` of a cluster profile, and its object is a subclass of `Scheduler`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

from launcher.schedulers.base import Scheduler, SchedulerError

if TYPE_CHECKING:
    from launcher.spec.cluster import Cluster


class UnknownSchedulerError(SchedulerError):
    """The package that registers the profile's scheduler is not installed."""


BUILT_IN = {
    "local": "launcher.schedulers.local:LocalScheduler",
    "slurm": "launcher.schedulers.slurm.scheduler:SlurmScheduler",
    "ssh": "launcher.schedulers.ssh.scheduler:SshHosts",
    "runpod": "launcher.schedulers.runpod.scheduler:RunPodScheduler",
}


def of_cluster(cluster: Cluster) -> Scheduler:
    """The scheduler of a cluster. Raises SchedulerError."""
    return of_record(cluster.model_dump(mode="json", by_alias=True))


def of_record(cluster: Mapping[str, Any]) -> Scheduler:
    """The scheduler of a profile as recorded in `run.json`. Raises SchedulerError."""
    kind = scheduler_class(str(cluster.get("scheduler")))
    place = kind.place(cluster)
    if (kind, place) not in opened:
        opened[kind, place] = kind.at(cluster)
    return opened[kind, place]


opened: dict[tuple[type[Scheduler], Hashable], Scheduler] = {}
"One object per place, so that the object that prepares a run also sends it."


@functools.cache
def scheduler_class(name: str) -> type[Scheduler]:
    """The class of a scheduler. Raises UnknownSchedulerError."""
    if name in BUILT_IN:
        module, _, found = BUILT_IN[name].partition(":")
        kind: type[Scheduler] = getattr(importlib.import_module(module), found)
    else:
        from launcher.spec.plugins import registered

        if (entry := registered().get(name)) is None:
            raise UnknownSchedulerError(
                f"there is no scheduler {name!r} here; is the package installed that has it?"
            )
        kind = entry.load()
    return kind

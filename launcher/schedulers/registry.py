"""Find the scheduler of a cluster: one of launcher's own, or one that another package registers.

A package registers a scheduler as an entry point of the group `launcher.schedulers`. The entry point's name
is the `scheduler:` of a cluster profile, and its object is a subclass of `Scheduler`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Hashable
from typing import TYPE_CHECKING

from launcher.schedulers.base import Scheduler, SchedulerError
from launcher.spec.records import ClusterRecord

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
    """Return the scheduler of a cluster. Raises SchedulerError."""
    return of_record(ClusterRecord.of_profile(cluster))


def of_record(cluster: ClusterRecord) -> Scheduler:
    """Return the scheduler of a profile as recorded in `run.json`. Raises SchedulerError."""
    scheduler = scheduler_class(cluster.scheduler or "local")
    place = scheduler.place(cluster)
    if (scheduler, place) not in opened:
        opened[scheduler, place] = scheduler.at(cluster)
    return opened[scheduler, place]


opened: dict[tuple[type[Scheduler], Hashable], Scheduler] = {}
"One object per place, so that the object that prepares a run also sends it."


@functools.cache
def scheduler_class(name: str) -> type[Scheduler]:
    """Return the class of a scheduler. Raises UnknownSchedulerError."""
    if name in BUILT_IN:
        module, _, class_name = BUILT_IN[name].partition(":")
        scheduler: type[Scheduler] = getattr(importlib.import_module(module), class_name)
    else:
        from launcher.spec.plugins import registered

        if (entry := registered().get(name)) is None:
            raise UnknownSchedulerError(
                f"there is no scheduler {name!r} here; install the package that provides it"
            )
        scheduler = entry.load()
    return scheduler

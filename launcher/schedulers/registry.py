"""Which scheduler serves a cluster or a handle."""

from __future__ import annotations

from launcher.schedulers.base import Scheduler
from launcher.schedulers.local import LocalScheduler
from launcher.schedulers.render_only import RunPodScheduler, SlurmScheduler

_SCHEDULERS: dict[str, type[Scheduler]] = {
    "local": LocalScheduler,
    "slurm": SlurmScheduler,
    "runpod": RunPodScheduler,
}


def scheduler_for(name: str) -> Scheduler:
    """By the `scheduler:` of a profile."""
    return _SCHEDULERS[name]()

"""Which scheduler serves a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launcher.schedulers.base import Scheduler, SchedulerError

if TYPE_CHECKING:
    from launcher.schedulers.slurm.scheduler import SlurmScheduler
    from launcher.spec.cluster import Cluster


def of_cluster(cluster: Cluster) -> Scheduler:
    if cluster.scheduler == "slurm":
        return slurm_at(cluster.login)
    if cluster.scheduler == "runpod":
        from launcher.schedulers.render_only import RunPodScheduler

        return RunPodScheduler()
    from launcher.schedulers.local import LocalScheduler

    return LocalScheduler()


def slurm_at(login: str | None) -> SlurmScheduler:
    """On this host, or at a login node."""
    from launcher.schedulers.slurm.scheduler import SlurmScheduler

    if login is not None:
        raise SchedulerError(f"login {login}: not yet")
    return SlurmScheduler()

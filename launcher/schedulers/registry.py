"""Which scheduler serves a cluster."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from launcher.schedulers.base import Scheduler

if TYPE_CHECKING:
    from launcher.schedulers.runpod.scheduler import RunPodScheduler
    from launcher.schedulers.slurm.scheduler import SlurmScheduler
    from launcher.schedulers.ssh.scheduler import SshHosts
    from launcher.spec.cluster import Cluster


def of_cluster(cluster: Cluster) -> Scheduler:
    if cluster.scheduler == "slurm":
        return slurm_at(cluster.login, cluster.paths.runs, cluster.slurm and cluster.slurm.clusters)
    if cluster.ssh is not None:
        return ssh_at(cluster.ssh.hosts, cluster.paths.runs)
    if cluster.scheduler == "runpod":
        return runpod()
    from launcher.schedulers.local import LocalScheduler

    return LocalScheduler()


@functools.cache
def slurm_at(login: str | None, runs: str | None, clusters: str | None = None) -> SlurmScheduler:
    """On this host, or at a login node that has its runs in the folder `runs`. One for each place: what it
    prepares, it also sends."""
    if login is not None:
        from launcher.schedulers.slurm.remote import RemoteSlurm

        return RemoteSlurm(login, runs, clusters)
    from launcher.schedulers.slurm.scheduler import SlurmScheduler

    return SlurmScheduler(clusters)


@functools.cache
def runpod() -> RunPodScheduler:
    """One: what it prepares, it also sends."""
    from launcher.schedulers.runpod.scheduler import RunPodScheduler

    return RunPodScheduler()


@functools.cache
def ssh_at(hosts: tuple[str, ...], runs: str | None) -> SshHosts:
    """Hosts that have their runs in the folder `runs`. One for each place, as `slurm_at`."""
    from launcher.schedulers.ssh.scheduler import SshHosts

    return SshHosts(hosts, runs)

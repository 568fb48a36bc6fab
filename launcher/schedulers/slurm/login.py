"""Find out where Slurm's commands run and run directories are: on this host, or behind a login node."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from launcher.schedulers.login import LocalLogin, Login
from launcher.schedulers.store import Store
from launcher.spec.records import ClusterRecord

if TYPE_CHECKING:
    from launcher.schedulers.over_ssh.ssh import SshLogin


def store_of(cluster: ClusterRecord) -> Store:
    """Return the store of a profile's run directories. Raises SchedulerError."""
    clusters = cluster.slurm.clusters
    if (host := cluster.login) is None:
        return Store(LocalLogin(_select_cluster(clusters)))
    from launcher.schedulers.over_ssh.remote_store import RemoteStore, absolute_runs_folder

    remote_root = absolute_runs_folder(cluster.paths.runs, f"login {host}")
    return RemoteStore(_remote_login(host, clusters), remote_root)


def login_to(host: str | None) -> Login:
    """Return a login to a site with the commands of its default cluster. `host` None means this host."""
    return LocalLogin() if host is None else _remote_login(host, None)


def _remote_login(host: str, clusters: str | None) -> SshLogin:
    """Return a login to a host. Many sites add Slurm's commands to the PATH of login shells only."""
    from launcher.schedulers.over_ssh.ssh import SshLogin, login_environment

    return SshLogin(host, login_environment(unless="squeue") + _select_cluster(clusters))


def _select_cluster(clusters: str | None) -> str:
    """Return shell that makes Slurm's commands query one of a site's clusters; None means the default.

    sacct ignores the variable. For the host's own cluster nothing is set, because with the variable each
    command queries slurmdbd first, and hangs if that hangs.
    """
    if not clusters:
        return ""
    own_name = "$(scontrol show config 2>/dev/null | sed -n 's/^ClusterName *= *//p')"
    return f'[ "{own_name}" = {shlex.quote(clusters)} ] || export SLURM_CLUSTERS={shlex.quote(clusters)}\n'

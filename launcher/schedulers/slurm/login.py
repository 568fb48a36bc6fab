"""Where Slurm's commands run and run directories are: on this host, or behind a login node."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from launcher.schedulers.login import Here, Login
from launcher.schedulers.store import Folder, Store

if TYPE_CHECKING:
    from launcher.schedulers.over_ssh.ssh import Over


def store_of(cluster: Mapping[str, Any]) -> Store:
    """The run directories of a profile. Raises SchedulerError."""
    clusters = (cluster.get("slurm") or {}).get("clusters")
    if (host := cluster.get("login")) is None:
        return Folder(Here(_asking(clusters)))
    from launcher.schedulers.over_ssh.remote_store import RemoteStore, absolute

    there = absolute((cluster.get("paths") or {}).get("runs"), f"login {host}")
    return RemoteStore(_over(host, clusters), there)


def login_to(host: str | None) -> Login:
    """A shell with the commands of a site's default cluster; None for this host."""
    return Here() if host is None else _over(host, None)


def _over(host: str, clusters: str | None) -> Over:
    """Many sites add Slurm's commands to the PATH of login shells only."""
    from launcher.schedulers.over_ssh.ssh import Over, login_environment

    return Over(host, login_environment(unless="squeue") + _asking(clusters))


def _asking(clusters: str | None) -> str:
    """Shell after which Slurm's commands query this one of a site's clusters; None for the default.

    sacct does not read the variable by itself. If the cluster is the host's own, nothing is set: with the
    variable each command queries slurmdbd first, and hangs if that hangs.
    """
    if not clusters:
        return ""
    own = "$(scontrol show config 2>/dev/null | sed -n 's/^ClusterName *= *//p')"
    return f'[ "{own}" = {shlex.quote(clusters)} ] || export SLURM_CLUSTERS={shlex.quote(clusters)}\n'

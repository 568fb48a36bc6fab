"""Detect the GPUs of hosts for `node.gpu: auto`."""

from __future__ import annotations

from typing import Any

from launcher.schedulers.base import SchedulerError
from launcher.schedulers.over_ssh.ssh import SshLogin
from launcher.schedulers.ssh.choose import DEFAULT_PYTHON
from launcher.schedulers.ssh.hosts import HostError, ask_host, in_parallel, results_or_raise
from launcher.schedulers.ssh.profile import Ssh
from launcher.spec.cluster import Cluster, Gpu

WRITE = "write node.gpu into the profile, such as `gpu: {type: NVIDIA RTX A6000, count: 8, memory: 47.4GiB}`"


def with_gpus_of_hosts(cluster: Cluster) -> Cluster:
    """Fill in the GPUs that nvidia-smi shows on the hosts that answer. Hosts without nvidia-smi have none.

    Raises SchedulerError if no host answers or if their GPUs differ.
    """
    python = cluster.paths.python or DEFAULT_PYTHON
    hosts = [SshLogin(host) for host in Ssh.used_by(cluster).hosts]
    answers = in_parallel(lambda host: ask_host(host, python, {"do": "gpus"}), hosts)
    if all(isinstance(answer, SchedulerError) for answer in answers):
        results_or_raise(answers)
    gpus_by_host = {
        host.name: _gpu(host.name, answer["gpus"])
        for host, answer in zip(hosts, answers, strict=True)
        if not isinstance(answer, SchedulerError)
    }
    gpu_names = {
        host: f"{gpu.count} x {gpu.type}" if gpu is not None else "none" for host, gpu in gpus_by_host.items()
    }
    if len(set(gpu_names.values())) > 1:
        listed = "; ".join(f"{host}: {gpus}" for host, gpus in gpu_names.items())
        raise HostError(
            f"node.gpu: auto: the hosts of {cluster.name} have different GPUs ({listed}); {WRITE}, "
            "or a profile for each kind of host"
        )
    return cluster.with_node(gpu=min(gpus_by_host.values(), key=lambda gpu: gpu.memory if gpu else 0))


def _gpu(host: str, rows: list[list[Any]]) -> Gpu | None:
    """Return the GPUs of one host, or None if it has none. Raises HostError if they differ."""
    if not rows:
        return None
    if len({name for name, _ in rows}) > 1 or any(mib is None for _, mib in rows):
        memory = (f"{mib} MiB" if mib else "unknown memory" for _, mib in rows)
        have = ", ".join(f"{name} with {what}" for (name, _), what in zip(rows, memory, strict=True))
        raise HostError(f"node.gpu: auto: {host} has {have}; {WRITE}")
    return Gpu(type=rows[0][0], count=len(rows), memory=min(mib for _, mib in rows) * 2**20)

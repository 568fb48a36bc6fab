"""Write a first profile of hosts without a batch system, from what they report."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from launcher.schedulers.login import ask
from launcher.schedulers.over_ssh.ssh import SshLogin
from launcher.schedulers.ssh.detect import with_gpus_of_hosts
from launcher.schedulers.ssh.hosts import HostError, in_parallel, results_or_raise
from launcher.spec.cluster import Cluster
from launcher.spec.quantities import written_bytes
from launcher.spec.records import ClusterRecord

QUESTIONS = {
    "home": ["sh", "-c", 'printf %s "$HOME"'],
    "python": ["sh", "-c", "command -v python3"],
    "cpus": ["getconf", "_NPROCESSORS_ONLN"],
    "memory": ["awk", "/^MemTotal:/ { print $2 * 1024 }", "/proc/meminfo"],
}


def first_profile(hosts: Sequence[str]) -> str:
    """Return the profile as YAML, with a comment wherever you must check a value.

    Raises SchedulerError if a host does not answer or the hosts have different GPUs, and SpecError if a host
    name is invalid.
    """
    answers = results_or_raise(in_parallel(lambda host: ask(SshLogin(host), QUESTIONS), hosts))
    hardware = [
        {name: answer.out.strip() for name, answer in host_hardware.items()} for host_hardware in answers
    ]
    for host, host_hardware in zip(hosts, hardware, strict=True):
        if not host_hardware["python"]:
            raise HostError(
                f"{host}: there is no python3 for non-interactive logins, so launcher cannot inspect the host"
            )
    fields = {
        "name": re.sub(r"[^A-Za-z0-9_.-]+", "-", hosts[0].rpartition("@")[2]).strip("-."),
        "scheduler": "ssh",
        "ssh": {"hosts": list(hosts)},
        "paths": {"runs": f"{hardware[0]['home']}/launcher-runs", "python": hardware[0]["python"]},
    }
    gpu = with_gpus_of_hosts(Cluster.model_validate(fields)).node.gpu
    node: dict[str, Any] = {"cpus": min(int(values["cpus"]) for values in hardware)}
    node["memory"] = written_bytes(min(int(float(values["memory"])) for values in hardware))
    if gpu is not None:
        node = {"gpu": {"type": gpu.type, "count": gpu.count, "memory": written_bytes(gpu.memory)}, **node}
    return _as_yaml({**fields, "node": node})


def describes(hosts: Sequence[str], cluster: ClusterRecord) -> bool:
    """Return whether a profile describes these hosts."""
    return cluster.ssh is not None and set(cluster.ssh.hosts) == set(hosts)


def _as_yaml(fields: Mapping[str, Any]) -> str:
    profile = CommentedMap(fields)
    hosts = CommentedSeq(fields["ssh"]["hosts"])
    hosts.fa.set_flow_style()
    profile["ssh"] = CommentedMap(hosts=hosts)
    profile["paths"] = paths = CommentedMap(fields["paths"])
    paths.yaml_add_eol_comment("CHECK: a folder that the hosts share, or a separate one on each", "runs")
    paths.yaml_add_eol_comment("CHECK: has launcher with its extra `train`", "python")
    out = io.StringIO()
    out.write("# By `launcher clusters detect --host`, from what the hosts report. CHECK marks guesses.\n")
    YAML().dump(profile, out)
    return out.getvalue()

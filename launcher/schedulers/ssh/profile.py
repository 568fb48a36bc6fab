"""The `ssh:` section of a cluster profile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, field_validator

from launcher.spec.cluster import Cluster, Host
from launcher.spec.scheduler_section import Section


class Ssh(Section):
    """Hosts without a batch system, reached over ssh."""

    missing: ClassVar[str] = "an `ssh:` section, for example `ssh: {hosts: [tensor01]}`"
    runs_elsewhere: ClassVar[bool] = True
    has_queue: ClassVar[bool] = False
    replaces_nodes: ClassVar[bool] = False

    hosts: Annotated[tuple[Host, ...], Field(min_length=1)]
    "Hosts as `ssh` accepts them. A job on n nodes takes the first n that have enough free GPUs."

    @field_validator("hosts")
    @classmethod
    def _each_once(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        if twice := sorted({host for host in hosts if hosts.count(host) > 1}):
            raise ValueError(f"{', '.join(twice)} is listed twice")
        return hosts

    @classmethod
    def implied(cls, section: Any) -> Mapping[str, Any]:
        """A job may use as many nodes as there are hosts."""
        hosts = section.get("hosts") if isinstance(section, dict) else None
        return {"max_nodes": len(hosts)} if isinstance(hosts, list) and hosts else {}

    def contradictions(self, cluster: Cluster) -> Iterator[tuple[tuple[str, ...], str]]:
        if cluster.max_nodes > len(self.hosts):
            yield ("max_nodes",), f"is {cluster.max_nodes}, but ssh.hosts names {len(self.hosts)}"

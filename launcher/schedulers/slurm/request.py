"""What a job asks of Slurm against what the site offers: what can never start, and what may go wrong."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from launcher.planning.hardware import memory_of
from launcher.planning.plan import Plan
from launcher.schedulers.slurm.cards import likely_cards
from launcher.schedulers.slurm.limits import Asked, exceeded, flags
from launcher.schedulers.slurm.site import Nodes, Partition, Site, default_memory
from launcher.spec.base import format_bytes, format_duration
from launcher.spec.cluster import Cluster, Slurm
from launcher.spec.job import Job

STARTS_SECONDS = 60
"From the start of a job to its first step, at least: nodes are looked at, ranks import torch and meet."


@dataclass(frozen=True)
class Request:
    """What the job asks of Slurm, against what the site offers."""

    cluster: Cluster
    job: Job
    plan: Plan
    site: Site

    @property
    def slurm(self) -> Slurm:
        return self.cluster.slurm or Slurm()

    @property
    def partitions(self) -> list[Partition]:
        """Those asked for that exist; Slurm takes the first of them that has room."""
        if self.slurm.partition is None:
            return [one] if (one := self.site.default_partition) else []
        return [self.site.partitions[name] for name in self._named if name in self.site.partitions]

    @property
    def _named(self) -> list[str]:
        return self.slurm.partition.split(",") if self.slurm.partition else []

    def refusals(self) -> Iterator[str]:
        if not self.site.partitions:
            return  # scontrol gave no answer: sbatch --test-only alone decides
        known = ", ".join(sorted(self.site.partitions))
        for name in self._named:
            if name not in self.site.partitions:
                yield f"slurm.partition: there is no partition {name} here; there are {known}"
        if not self._named and not self.partitions:
            yield f"slurm.partition: the site has no default partition; name one of {known}"
        yield from self._account()
        if not self.partitions:
            return
        # Of several partitions one that takes the job is enough.
        of_each = [[*self._of_partition(one), *self._nodes(one)] for one in self.partitions]
        if all(of_each):
            yield from of_each[0]

    def _of_partition(self, partition: Partition) -> Iterator[str]:
        wanted, name, slurm = self.job.resources, partition.name, self.slurm
        nodes, lifted = self.plan.layout.nodes, flags(self.site, partition, slurm.account, slurm.qos)
        longest = None if "PartitionTimeLimit" in lifted else partition.max_time
        if wanted.time is not None and longest is not None and wanted.time > longest:
            yield (
                f"resources.time: {format_duration(wanted.time)} asked for, partition {name} allows"
                f" {format_duration(longest)}; training goes on in the next job by itself"
            )
        given = partition.time_given
        if wanted.time is None and given is not None and given <= slurm.signal_seconds + STARTS_SECONDS:
            yield (
                f"resources.time: partition {name} gives {format_duration(given)} to a job without one,"
                f" and slurm.signal_seconds is {format_duration(slurm.signal_seconds)}: it would be asked to"
                " stop before its first step"
            )
        most = min(partition.max_nodes or partition.node_count, partition.node_count)
        most = partition.node_count if "PartitionMaxNodes" in lifted else most
        if nodes > most:
            yield f"resources.nodes: {nodes} asked for, partition {name} gives {most}"
        for what, value in (("Accounts", slurm.account), ("Qos", slurm.qos)):
            if value is not None and partition.refuses(what, value):
                field = "account" if what == "Accounts" else "qos"
                allowed = partition.fields.get(f"Allow{what}", "ALL")
                takes = f"it takes {allowed}" if allowed != "ALL" else "it takes others"
                yield f"slurm.{field}: partition {name} does not take {value}; {takes}"
        yield from self._limits(partition)

    def _nodes(self, partition: Partition) -> Iterator[str]:
        """The first thing that leaves too few nodes, so that the message names one cause."""
        groups, where = self.site.of(partition.name), f"partition {partition.name}"
        need = min(self.plan.layout.nodes, partition.node_count)  # too many nodes have their own message
        if not groups:
            return
        gpus = self.plan.layout.gpus_per_node if self.slurm.gpu_request != "none" else 0
        type_, resources = self.slurm.gres_type, self.job.resources
        if gpus:
            offered = sorted({_gres_words(group) for group in groups})
            fits = [group for group in groups if group.has(gpus, type_)]
            if type_ is not None and not any(group.has(1, type_) for group in groups):
                there = ", ".join(offered)
                yield f"slurm.gres_type: no node of {where} has GPUs of type {type_}; there are {there}"
                return
            if _count(fits) < need:
                asked = f"{gpus} GPUs{f' of type {type_}' if type_ else ''} on {_nodes_words(need)}"
                yield f"resources.gpus_per_node: {asked} asked for; {where} has {', '.join(offered)}"
                return
            groups = fits
        sizes: tuple[tuple[str, int | None, Callable[[Nodes], int], Callable[[int], str]], ...] = (
            ("cpus_per_node", resources.cpus_per_node, lambda group: group.cpus, str),
            ("memory_per_node", resources.memory_per_node, lambda group: group.memory, format_bytes),
        )
        for field, size, of, show in sizes:
            if size is None:
                continue
            fits = [group for group in groups if of(group) >= size]
            if _count(fits) < need:
                most = max(of(group) for group in groups)
                yield f"resources.{field}: {show(size)} asked for, a node of {where} gives {show(most)}"
                return
            groups = fits
        wanted = self.slurm.constraint
        plain = wanted is not None and re.fullmatch(r"[\w.-]+", wanted) is not None
        if plain and _count([group for group in groups if wanted in group.features]) < need:
            features = ", ".join(sorted(_features(groups))) or "none"
            yield f"slurm.constraint: too few nodes of {where} have {wanted}; their features are {features}"

    def _account(self) -> Iterator[str]:
        """Where Slurm refuses what accounting does not know."""
        rows, slurm = self.site.associations, self.slurm
        if rows is None or "associations" not in self.site.enforces:
            return
        own = [row for row in rows if row.get("User")]
        accounts = sorted({row["Account"] for row in own})
        if not own:
            yield "Slurm's accounting knows no account of yours here: ask the site's administrators"
        elif slurm.account is not None and slurm.account not in accounts:
            yield f"slurm.account: {slurm.account} is none of yours; yours are {', '.join(accounts)}"
        if slurm.qos is None or not own:
            return
        allowed = {qos for row in own for qos in row.get("QOS", "").split(",") if qos}
        if self.site.qos is not None and slurm.qos not in self.site.qos:
            yield f"slurm.qos: there is no QOS {slurm.qos} here; yours are {', '.join(sorted(allowed))}"
        elif "qos" in self.site.enforces and allowed and slurm.qos not in allowed:
            yield f"slurm.qos: you may not use {slurm.qos}; yours are {', '.join(sorted(allowed))}"

    def _limits(self, partition: Partition) -> Iterator[str]:
        """Limits that this one job exceeds by itself: it would wait for ever."""
        slurm = self.slurm
        for one in exceeded(self._asked(partition), self.site, partition, slurm.account, slurm.qos):
            yield f"{_FIELDS[one.what.partition(':')[0]]}: {one.words}"

    def _asked(self, partition: Partition) -> Asked:
        resources, layout = self.job.resources, self.plan.layout
        per_node = {"cpu": resources.cpus_per_node or self._share_of_cpus()}
        memory, _ = self._memory(partition)
        if memory is not None:
            per_node["mem"] = memory
        if layout.gpus_per_node and self.slurm.gpu_request != "none":
            per_node["gres/gpu"] = layout.gpus_per_node
            if self.slurm.gres_type is not None:
                per_node[f"gres/gpu:{self.slurm.gres_type}"] = layout.gpus_per_node
        return Asked(layout.nodes, per_node, resources.time)

    def warnings(self) -> Iterator[str]:
        for partition in self.partitions:
            if partition.state != "UP":
                yield f"partition {partition.name} is {partition.state}: it starts no jobs at the moment"
        if not self.partitions:
            return
        partition = self.partitions[0]
        groups = self.site.of(partition.name)
        default = partition.time_given
        if self.job.resources.time is None and default is not None and math.isfinite(default):
            yield (
                f"no resources.time: each Slurm job of this run gets partition {partition.name}'s"
                f" {format_duration(default)}"
            )
        yield from self._unchecked(groups)
        usable = _count([group for group in groups if group.usable])
        if usable < self.plan.layout.nodes <= _count(groups):
            yield f"only {usable} nodes of partition {partition.name} are up: the job will wait for more"
        yield from self._gpu_memory(groups)
        yield from self._host_memory(partition, groups)

    def _unchecked(self, groups: list[Nodes]) -> Iterator[str]:
        """What Slurm takes, whether it means anything or not."""
        slurm = self.slurm
        if self.site.config and "associations" not in self.site.enforces:
            for field, value in (("account", slurm.account), ("qos", slurm.qos)):
                if value is not None:
                    yield f"slurm.{field}: {value} was not checked: this site's Slurm takes any"
        asks = self.plan.layout.gpus_per_node and slurm.gpu_request != "none"
        type_ = slurm.gres_type
        if type_ and groups and not asks and not any(group.has(1, type_) for group in groups):
            yield f"slurm.gres_type: no node of partition {groups[0].partition} has GPUs of type {type_}"

    def _gpu_memory(self, groups: list[Nodes]) -> Iterator[str]:
        """The profile's GPU, by which was planned, against those that the job may get."""
        gpu, gpus = self.cluster.node.gpu, self.plan.layout.gpus_per_node
        if gpu is None or not gpus or self.slurm.gpu_request == "none":
            return
        type_ = self.slurm.gres_type
        wanted = [group for group in groups if group.has(gpus, type_)]
        types = sorted({name for group in wanted for name, count in group.gpus if name and count >= gpus})
        if type_ is None and len(types) > 1 and self.slurm.constraint is None:
            yield f"slurm.gres_type is not set, and the job may get any of {', '.join(types)}"
        needed = self.plan.estimate.needed if self.plan.estimate is not None else None
        for name in types if type_ is None else [type_]:
            cards = likely_cards(name, _features(wanted))
            largest = max(map(memory_of, cards), default=None)
            if largest is None:
                continue
            if needed is not None and needed > largest:
                yield (
                    f"the plan needs {format_bytes(needed)} of each GPU; {name} has {format_bytes(largest)}"
                    f" at most (the profile says {format_bytes(gpu.memory)})"
                )
            elif gpu.memory > largest * 1.02:
                yield (
                    f"node.gpu.memory: the profile says {format_bytes(gpu.memory)}, but a GPU of type {name}"
                    f" has {format_bytes(largest)} at most"
                )

    def _host_memory(self, partition: Partition, groups: list[Nodes]) -> Iterator[str]:
        """What a node's processes will need against what Slurm will let them have."""
        needed = self.plan.estimate.host_per_node if self.plan.estimate is not None else 0
        given, why = self._memory(partition)
        if needed and given is not None and needed > given:
            yield (
                f"the plan needs {format_bytes(needed)} of host memory on each node, and the job gets"
                f" {format_bytes(given)} ({why}): set resources.memory_per_node"
            )
        elif needed and groups and given is None and needed > max(group.memory for group in groups):
            most = format_bytes(max(group.memory for group in groups))
            yield f"the plan needs {format_bytes(needed)} of host memory on each node; nodes here have {most}"

    def _memory(self, partition: Partition) -> tuple[int | None, str]:
        resources, slurm = self.job.resources, self.slurm
        if resources.memory_per_node is not None:
            return resources.memory_per_node, "resources.memory_per_node"
        if slurm.exclusive or any(name in slurm.extra for name in ("mem", "mem-per-cpu", "mem-per-gpu")):
            return None, ""
        cpus = resources.cpus_per_node or self._share_of_cpus()
        return default_memory(self.site, partition, cpus, self.plan.layout.gpus_per_node) or (None, "")

    def _share_of_cpus(self) -> int:
        node, gpus = self.cluster.node, self.plan.layout.gpus_per_node
        if node.cpus is None:
            return 1
        return node.cpus * gpus // node.gpu.count if node.gpu and node.gpu.count and gpus else node.cpus


_FIELDS = {
    "time": "resources.time",
    "node": "resources.nodes",
    "cpu": "resources.cpus_per_node",
    "mem": "resources.memory_per_node",
    "gres/gpu": "resources.gpus_per_node",
}


def _features(groups: list[Nodes]) -> frozenset[str]:
    return frozenset().union(*(group.features for group in groups))


def _nodes_words(count: int) -> str:
    return "one node" if count == 1 else f"each of {count} nodes"


def _count(groups: list[Nodes]) -> int:
    return sum(group.count for group in groups)


def _gres_words(group: Nodes) -> str:
    return " and ".join(f"{count} x {name or 'gpu'}" for name, count in group.gpus) or "no GPUs"

"""Compare a job's Slurm request with what the site offers. Refuse what can never start; warn about risks."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from launcher.planning.hardware import memory_of
from launcher.planning.plan import Plan
from launcher.schedulers.slurm.gpu_types import likely_types
from launcher.schedulers.slurm.limits import Requested, associations, default_qos, exceeded, flags
from launcher.schedulers.slurm.profile import Slurm
from launcher.schedulers.slurm.scripts import MEMORY_OPTIONS, cpus_per_node
from launcher.schedulers.slurm.site import Nodes, Partition, Site, allowed_qos, default_memory, node_count
from launcher.spec.cluster import Cluster
from launcher.spec.job import Job
from launcher.spec.quantities import format_bytes, format_duration

STARTS_SECONDS = 60
"Minimum time from a job's start to its first step: nodes are checked, ranks import torch and connect."


@dataclass(frozen=True)
class Feasibility:
    """A job's request to Slurm, compared with what the site offers."""

    cluster: Cluster
    job: Job
    plan: Plan
    site: Site
    tasks: int = 1
    "Tasks in the array."

    @property
    def slurm(self) -> Slurm:
        return Slurm.used_by(self.cluster)

    @property
    def partitions(self) -> list[Partition]:
        """The requested partitions that exist. Slurm takes the first of them that has room."""
        if self.slurm.partition is None:
            return [partition] if (partition := self.site.default_partition) else []
        return [self.site.partitions[name] for name in self._named if name in self.site.partitions]

    @property
    def _named(self) -> list[str]:
        return self.slurm.partition.split(",") if self.slurm.partition else []

    @property
    def _gpus(self) -> int:
        """GPUs of each node that the job requests; 0 if the site gives them without a request."""
        return self.plan.layout.gpus_per_node if self.slurm.assigns_gpus else 0

    def refusals(self) -> Iterator[str]:
        if not self.site.partitions:
            return  # scontrol gave no answer: only sbatch --test-only decides
        partition_names = ", ".join(sorted(self.site.partitions))
        for name in self._named:
            if name not in self.site.partitions:
                yield f"slurm.partition: there is no partition {name} here; there are {partition_names}"
        if not self._named and not self.partitions:
            yield f"slurm.partition: the site has no default partition; name one of {partition_names}"
        yield from self._account()
        yield from self._array()
        if not self.partitions:
            return
        # If one of several partitions accepts the job, that is enough.
        by_partition = [
            [*self._of_partition(partition), *self._nodes(partition)] for partition in self.partitions
        ]
        if all(by_partition):
            yield from by_partition[0]

    def _array(self) -> Iterator[str]:
        config = self.site.config
        limits = {"MaxArraySize": config.get("MaxArraySize", "")}
        scheduling = re.search(r"\bmax_array_tasks=(\d+)", config.get("SchedulerParameters", ""))
        if scheduling is not None:
            limits["SchedulerParameters=max_array_tasks"] = scheduling[1]
        for name, limit in limits.items():
            if limit.isdigit() and self.tasks > int(limit):
                yield (
                    f"--sweep: {self.tasks} runs requested, an array may have {limit} tasks here ({name}):"
                    " submit them in several sweeps"
                )

    def _of_partition(self, partition: Partition) -> Iterator[str]:
        resources, name, slurm = self.job.resources, partition.name, self.slurm
        nodes, lifted = self.plan.layout.nodes, flags(self.site, partition, self._account_used, slurm.qos)
        longest = None if "PartitionTimeLimit" in lifted else partition.max_time
        if resources.time is not None and longest is not None and resources.time > longest:
            yield (
                f"resources.time: {format_duration(resources.time)} asked for, partition {name} allows"
                f" {format_duration(longest)}; training continues in the next job by itself"
            )
        given = partition.time_given
        warned = self.job.stop_seconds(slurm.signal_seconds)
        if resources.time is None and given is not None and given <= warned + STARTS_SECONDS:
            yield (
                f"resources.time: partition {name} gives {format_duration(given)} to a job without one,"
                f" and the run is asked to stop {format_duration(warned)} before its end (stop_timeout, or"
                " slurm.signal_seconds): before its first step"
            )
        most = partition.node_count if "PartitionMaxNodes" in lifted else partition.most_nodes
        if nodes > most:
            yield f"resources.nodes: {nodes} asked for, partition {name} gives {most}"
        yield from self._access_refusals(partition)
        yield from self._limits(partition)

    def _access_refusals(self, partition: Partition) -> Iterator[str]:
        """Yield if the partition does not allow the account or QOS. Slurm lets such a job wait forever."""
        account, qos = self._account_used, self._qos_used
        # Newer versions also accept the accounts below an allowed one.
        if account is not None and all(
            partition.refuses("Accounts", name) for name in self.site.above(account)
        ):
            permitted = [name for name in self.site.accounts() if not partition.refuses("Accounts", name)]
            yield self._refusal("account", account, partition, partition.allowed("Accounts"), permitted)
        if qos is not None and partition.refuses("Qos", qos):
            rows = associations(self.site, partition.name, account)
            permitted = [name for name in allowed_qos(rows) if not partition.refuses("Qos", name)]
            yield self._refusal("qos", qos, partition, partition.allowed("Qos"), permitted)

    def _refusal(
        self, field: str, value: str, partition: Partition, allowed: list[str], own: list[str]
    ) -> str:
        """Return a message. `allowed` is what the partition accepts; `own` is the part that the user has."""
        requested, where = (self.slurm.account if field == "account" else self.slurm.qos), f"slurm.{field}"
        if field == "account" and self.site.given_account is not None:
            requested, where = self.site.given_account, "SBATCH_ACCOUNT"
        which = value if requested == value else f"your default, {value}"
        takes = f"it takes {', '.join(allowed)}" if allowed else "it takes others"
        if own:
            advice = f"set {where} to {' or '.join(own)}"
        elif self.site.associations is not None:
            advice = "none of yours may use it: choose another slurm.partition"
        else:
            advice = f"choose another {where} or slurm.partition"
        return f"{where}: partition {partition.name} does not take {which}; {takes}; {advice}"

    @property
    def _account_used(self) -> str | None:
        """The account that the job will use, or None if unknown or if the site's plugins may replace it."""
        if self.slurm.account is None and self.site.rewrites:
            return self.site.given_account
        return self.site.given_account or self.slurm.account or self.site.default_account

    @property
    def _qos_used(self) -> str | None:
        """The QOS that the job will use, or None as for `_account_used`.

        A default is known only if limits are enforced and it is the same in every association that the job
        may use.
        """
        if self.slurm.qos is not None or self.site.rewrites or "qos" not in self.site.enforces:
            return self.slurm.qos
        names = {
            default_qos(row)
            for partition in self.partitions
            for row in associations(self.site, partition.name, self._account_used)
        }
        return names.pop() if len(names) == 1 else None

    def _nodes(self, partition: Partition) -> Iterator[str]:
        """Refuse at the first condition that leaves too few nodes, so that the message names one cause."""
        groups, where = self.site.of(partition.name), f"partition {partition.name}"
        need = min(self.plan.layout.nodes, partition.node_count)  # too many nodes are refused elsewhere
        if not groups:
            return
        gpus, type_, resources = self._gpus, self.slurm.gres_type, self.job.resources
        if gpus:
            offered = sorted({_gres_words(group) for group in groups})
            fits = [group for group in groups if group.has(gpus, type_)]
            if type_ is not None and not any(group.has(1, type_) for group in groups):
                types = ", ".join(offered)
                yield f"slurm.gres_type: no node of {where} has GPUs of type {type_}; there are {types}"
                return
            if node_count(fits) < need:
                requested = f"{gpus} GPUs{f' of type {type_}' if type_ else ''} on {_nodes_words(need)}"
                yield f"resources.gpus_per_node: {requested} asked for; {where} has {', '.join(offered)}"
                return
            groups = fits
        cpus = resources.cpus_per_node if self.cluster.node.cpus is not None else self._cpus()
        sizes: tuple[tuple[str, int | None, Callable[[Nodes], int], Callable[[int], str]], ...] = (
            ("cpus_per_node", cpus, lambda group: group.cpus, str),
            ("memory_per_node", resources.memory_per_node, lambda group: group.memory, format_bytes),
        )
        for field, size, value_of, show in sizes:
            if size is None:
                continue
            fits = [group for group in groups if value_of(group) >= size]
            if node_count(fits) < need:
                most = max(value_of(group) for group in groups)
                yield f"resources.{field}: {show(size)} asked for, a node of {where} gives {show(most)}"
                return
            groups = fits
        wanted = self.slurm.constraint
        plain = wanted is not None and re.fullmatch(r"[\w.-]+", wanted) is not None
        if plain and node_count([group for group in groups if wanted in group.features]) < need:
            features = ", ".join(sorted(_features(groups))) or "none"
            yield f"slurm.constraint: too few nodes of {where} have {wanted}; their features are {features}"

    def _account(self) -> Iterator[str]:
        """Check account and QOS if the site enforces associations."""
        user_rows, slurm = self.site.own_associations, self.slurm
        if self.site.associations is None or "associations" not in self.site.enforces:
            return
        accounts, account = self.site.accounts(), self.site.given_account or slurm.account
        field = "SBATCH_ACCOUNT" if self.site.given_account else "slurm.account"
        if not user_rows:
            yield "Slurm's accounting knows no account of yours here: ask the site's administrators"
        elif account is not None and account not in accounts:
            yield f"{field}: {account} is not one of yours; yours are {', '.join(accounts)}"
        if slurm.qos is None or not user_rows:
            return
        allowed = allowed_qos(user_rows)
        if self.site.qos is not None and slurm.qos not in self.site.qos:
            yield f"slurm.qos: there is no QOS {slurm.qos} here; yours are {', '.join(allowed)}"
        elif "qos" in self.site.enforces and allowed and slurm.qos not in allowed:
            yield f"slurm.qos: you may not use {slurm.qos}; yours are {', '.join(allowed)}"

    def _limits(self, partition: Partition) -> Iterator[str]:
        """Yield limits that this job exceeds on its own, so that it would wait forever."""
        request = self._request(partition)
        for limit in exceeded(request, self.site, partition, self._account_used, self.slurm.qos):
            yield f"{_FIELDS[limit.what.partition(':')[0]]}: {limit.words}"

    def _request(self, partition: Partition) -> Requested:
        resources, layout = self.job.resources, self.plan.layout
        per_node = {"cpu": self._cpus()}
        memory, _ = self._memory(partition)
        if memory is not None:
            per_node["mem"] = memory
        if self._gpus:
            per_node["gres/gpu"] = self._gpus
            if self.slurm.gres_type is not None:
                per_node[f"gres/gpu:{self.slurm.gres_type}"] = self._gpus
        return Requested(layout.nodes, per_node, resources.time)

    def warnings(self) -> Iterator[str]:
        for partition in self.partitions:
            if partition.state != "UP":
                yield f"partition {partition.name} is {partition.state}: it starts no jobs at the moment"
        if not self.partitions:
            return
        partition = self.partitions[0]
        groups = self.site.of(partition.name)
        yield from self._no_time(partition)
        yield from self._unchecked(groups)
        if self.cluster.node.cpus is None and groups and self.job.resources.cpus_per_node is None:
            fewest = min(group.cpus for group in groups)
            yield f"node.cpus: nodes of partition {partition.name} have {fewest} CPUs; the profile may say so"
        usable = node_count([group for group in groups if group.usable])
        if usable < self.plan.layout.nodes <= node_count(groups):
            yield f"only {usable} nodes of partition {partition.name} are up: the job will wait for more"
        yield from self._gpu_memory(groups)
        yield from self._host_memory(partition, groups)

    def _no_time(self, partition: Partition) -> Iterator[str]:
        if self.job.resources.time is not None:
            return
        default = partition.time_given
        if default is not None and math.isfinite(default):
            yield (
                f"no resources.time: each Slurm job of this run gets partition {partition.name}'s"
                f" {format_duration(default)}"
            )
        else:
            yield (
                f"no resources.time, and partition {partition.name} has no limit: Slurm cannot backfill the"
                " job; with a limit it can, and training continues in the next job by itself"
            )

    def _unchecked(self, groups: list[Nodes]) -> Iterator[str]:
        """Warn about values that Slurm accepts unchecked, and about what accounting did not report."""
        slurm = self.slurm
        if self.site.silent:
            yield f"{self.site.silent}: account, QOS and limits were not checked"
        if self.site.config and "associations" not in self.site.enforces:
            for field, value in (("account", slurm.account), ("qos", slurm.qos)):
                if value is not None:
                    yield f"slurm.{field}: {value} was not checked: this site's Slurm accepts any value"
        type_ = slurm.gres_type
        if type_ and groups and not self._gpus and not any(group.has(1, type_) for group in groups):
            yield f"slurm.gres_type: no node of partition {groups[0].partition} has GPUs of type {type_}"

    def _gpu_memory(self, groups: list[Nodes]) -> Iterator[str]:
        """Compare the profile's GPU, which the plan is based on, with the GPUs that the job may get."""
        gpu, gpus = self.cluster.node.gpu, self._gpus
        if gpu is None or not gpus:
            return
        type_ = self.slurm.gres_type
        wanted = [group for group in groups if group.has(gpus, type_)]
        types = sorted({name for group in wanted for name, count in group.gpus if name and count >= gpus})
        if type_ is None and len(types) > 1 and self.slurm.constraint is None:
            yield f"slurm.gres_type is not set, and the job may get any of {', '.join(types)}"
        needed = self.plan.estimate.needed if self.plan.estimate is not None else None
        for name in types if type_ is None else [type_]:
            likely = likely_types(name, _features(wanted))
            largest = max(map(memory_of, likely), default=None)
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
        """Compare the host memory that a node's processes will need with what Slurm will grant."""
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
        if slurm.exclusive or not MEMORY_OPTIONS.isdisjoint(slurm.extra):
            return None, ""
        gpus = self.plan.layout.gpus_per_node
        return default_memory(self.site, partition, self._cpus(), gpus) or (None, "")

    def _cpus(self) -> int:
        """Return the minimum CPUs per node. What a site gives a job that asks for none is not known."""
        layout = self.plan.layout
        return cpus_per_node(self.job, self.cluster, layout.gpus_per_node, layout.ranks_per_node) or 1


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


def _gres_words(group: Nodes) -> str:
    return " and ".join(f"{count} x {name or 'gpu'}" for name, count in group.gpus) or "no GPUs"

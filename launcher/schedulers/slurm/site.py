"""Read in one round trip what a site's Slurm offers and allows: partitions, nodes, QOS, associations."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from launcher.schedulers.login import Answer
from launcher.schedulers.slurm.records import (
    BOUNDED,
    CLEAN,
    NO_ACCOUNTING,
    NOT_ASKED,
    accounting_trouble,
    duration,
)

MIB = 2**20


@dataclass(frozen=True)
class Partition:
    """A partition of the site."""

    name: str
    default: bool
    state: str
    "UP, DOWN, DRAIN or INACTIVE."
    max_time: float | None
    "Seconds; infinity for UNLIMITED."
    default_time: float | None
    max_nodes: int | None
    node_count: int
    fields: Mapping[str, str]
    "All fields of `scontrol show partition`."

    @property
    def time_given(self) -> float | None:
        """Time limit in seconds of a job that requests none."""
        return self.default_time if self.default_time is not None else self.max_time

    @property
    def most_nodes(self) -> int:
        """Maximum nodes of a job."""
        return min(self.max_nodes or self.node_count, self.node_count)

    @property
    def qos(self) -> str:
        value = self.fields.get("QoS", "")
        return "" if value == "N/A" else value

    @property
    def preempt_mode(self) -> str:
        return self.fields.get("PreemptMode", "")

    @property
    def exclusive(self) -> bool:
        return self.fields.get("OverSubscribe") == "EXCLUSIVE"

    def refuses(self, what: str, value: str) -> bool:
        """Return whether this account or QOS may not use the partition. `what` is Accounts or Qos."""
        allowed = self.allowed(what)
        return value not in allowed if allowed else value in self.fields.get(f"Deny{what}", "").split(",")

    def allowed(self, what: str) -> list[str]:
        """Return the only accounts or QOS that may use the partition, or [] if only some are denied."""
        names = [name for name in self.fields.get(f"Allow{what}", "").split(",") if name]
        return [] if names == ["ALL"] else names


@dataclass(frozen=True)
class Nodes:
    """A group of identical nodes of one partition."""

    partition: str
    gpus: tuple[tuple[str, int], ...]
    "(GRES type, count) of each kind of GPU in one node; the type is empty for untyped GPUs."
    cpus: int
    memory: int
    "Bytes that jobs may use on one node: Slurm's RealMemory."
    state: str
    "idle, mixed, allocated, drained, down ...; without the trailing flags `*`, `~`, `#`."
    count: int
    names: str
    "In Slurm's notation for a list of hosts."
    features: frozenset[str]

    @property
    def usable(self) -> bool:
        return not self.state.startswith(("down", "drain", "fail", "error", "unknown", "future", "inval"))

    def has(self, gpus: int, type_: str | None) -> bool:
        if not gpus:
            return True
        if type_ is None:
            return sum(count for _, count in self.gpus) >= gpus
        return any(count >= gpus for name, count in self.gpus if name == type_)


def node_count(groups: Iterable[Nodes]) -> int:
    return sum(group.count for group in groups)


Row = Mapping[str, str]


def allowed_qos(associations: Iterable[Row]) -> list[str]:
    """Return the QOS that may be used with one of these associations, sorted."""
    return sorted({name for row in associations for name in row.get("QOS", "").split(",") if name})


@dataclass(frozen=True)
class Site:
    """What a site's Slurm offers and allows."""

    partitions: Mapping[str, Partition] = field(default_factory=dict)
    nodes: tuple[Nodes, ...] = ()
    config: Mapping[str, str] = field(default_factory=dict)
    qos: Mapping[str, Row] | None = None
    "None if no limits are enforced, or if accounting does not exist or does not answer."
    associations: tuple[Row, ...] | None = None
    "This user's associations, and those of the accounts, whose field User is empty."
    default_account: str | None = None
    "Account of a job that names none: SBATCH_ACCOUNT, or else the user's default; None if unknown."
    given_account: str | None = None
    "SBATCH_ACCOUNT where sbatch runs; it takes precedence over the script."
    silent: str = ""
    "Why accounting did not answer although limits are enforced; empty if it did, or if none are enforced."

    @property
    def version(self) -> str:
        return self.config.get("SLURM_VERSION", "")

    @property
    def enforces(self) -> frozenset[str]:
        """What slurmctld enforces: some of `associations`, `limits`, `qos`, `safe`."""
        enforced = self.config.get("AccountingStorageEnforce", "").lower()
        return frozenset(word for word in enforced.split(",") if word not in ("", "none", "(null)"))

    @property
    def rewrites(self) -> bool:
        """Whether the site's own plugins may change a job's request when it is submitted."""
        return self.config.get("JobSubmitPlugins", "(null)") not in ("(null)", "", "none")

    @property
    def own_associations(self) -> list[Row]:
        """This user's associations, as far as they are known."""
        return [row for row in self.associations or () if row.get("User")]

    def accounts(self) -> list[str]:
        """Return the user's own accounts, as far as they are known."""
        return sorted({row["Account"] for row in self.own_associations})

    def above(self, account: str) -> Iterator[str]:
        """Yield the account and the accounts above it, as far as they are known."""
        parents = {
            row["Account"]: row.get("ParentName") or row.get("Par Name") or "root"
            for row in self.associations or ()
            if not row.get("User")
        }
        yield account
        while account in parents:
            account = parents.pop(account)
            yield account

    def of(self, partition: str) -> list[Nodes]:
        return [group for group in self.nodes if group.partition == partition]

    @property
    def default_partition(self) -> Partition | None:
        return next((partition for partition in self.partitions.values() if partition.default), None)


_SINFO = "%R|%G|%c|%m|%T|%D|%N|%f"
# If nothing is enforced, limits mean nothing, and a query to slurmdbd can be slow.
NOT_ENFORCED = 3
_ENFORCED = (
    "scontrol show config | grep -Eq '^AccountingStorageEnforce *= *(none|[(]null[)])' && "
    f"exit {NOT_ENFORCED}; exec"
)


RUNTIMES = {
    "pyxis": ["sh", "-c", "srun --help | grep -q -- --container-image"],
    "apptainer": ["sh", "-c", "command -v apptainer"],
}
"Queries that succeed if a container runtime is there."

# The columns that sacctmgr shows by default, and the parent account.
_OF_ACCOUNTS = (
    "cluster,account,user,partition,parentname,grpjobs,grptres,grpsubmit,grpwall,grptresmins,grptresrunmins,"
    "maxjobs,maxtres,maxtrespernode,maxsubmit,maxwall,maxtresmins,qos"
)


def questions() -> dict[str, list[str]]:
    """Return queries for `login.ask`. sacctmgr prints column names, which hardly differ between versions."""
    show = f"{_ENFORCED} {' '.join(BOUNDED)} sacctmgr --parsable2 show"
    return {
        "partitions": ["scontrol", "--oneliner", "show", "partition"],
        "nodes": [*CLEAN, "sinfo", "--noheader", "--exact", f"--format={_SINFO}"],
        "config": ["scontrol", "show", "config"],
        "qos": ["sh", "-c", f"{show} qos"],
        "associations": ["sh", "-c", f'{show} assoc where user="$(id -un)"'],
        "accounts": ["sh", "-c", f"{show} assoc where user= format={_OF_ACCOUNTS}"],
        "user": [
            "sh",
            "-c",
            f'{show} user where name="$(id -un)" withassoc format=cluster,user,defaultaccount',
        ],
        "given": ["sh", "-c", 'printf %s "${SBATCH_ACCOUNT-}"'],
    }


def site(answers: Mapping[str, Answer]) -> Site:
    """Parse the answers. A query without an answer leaves its fields empty."""
    qos, given = _table(answers["qos"]), answers.get("given", NOT_ASKED).out.strip() or None
    config = dict(_config(answers["config"].out))
    user_rows, accounts = (
        _of_cluster(_table(answers[name]), config.get("ClusterName")) for name in ("associations", "accounts")
    )
    return Site(
        partitions={
            partition.name: partition
            for partition in map(_partition, answers["partitions"].out.splitlines())
            if partition
        },
        nodes=tuple(group for group in map(_nodes, answers["nodes"].out.splitlines()) if group),
        config=config,
        qos=None if qos is None else {row["Name"]: row for row in qos if "Name" in row},
        associations=None
        if user_rows is None
        else (*user_rows, *(row for row in accounts or () if not row.get("User"))),
        default_account=given or _default_account(_table(answers.get("user", NOT_ASKED))),
        given_account=given,
        silent=next(
            (silence for name in OF_ACCOUNTING if (silence := _silence(answers.get(name, NOT_ASKED)))), ""
        ),
    )


OF_ACCOUNTING = ("qos", "associations", "accounts", "user")


def _silence(answer: Answer) -> str:
    if answer.code in (0, NOT_ENFORCED):
        return ""
    trouble = accounting_trouble(answer)
    return "" if trouble == NO_ACCOUNTING else trouble


def _default_account(rows: list[Row] | None) -> str | None:
    """Return the user's default account, or None for a user in several clusters.

    For these, Slurm does not report which default applies.
    """
    if not rows or len({row.get("Cluster") for row in rows}) > 1:
        return None
    return rows[0].get("Def Acct") or None


def _table(answer: Answer) -> list[Row] | None:
    lines = answer.out.splitlines()
    if answer.code != 0 or not lines:
        return None
    names = lines[0].split("|")
    return [dict(zip(names, line.split("|"), strict=False)) for line in lines[1:]]


def _of_cluster(rows: list[Row] | None, cluster: str | None) -> list[Row] | None:
    """Select this cluster's rows. Accounting may serve several clusters."""
    return rows and [row for row in rows if cluster is None or row.get("Cluster") in (None, cluster.lower())]


def _config(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        name, equals, value = line.partition(" = ")
        if equals:
            yield name.strip(), value.strip()


def _partition(line: str) -> Partition | None:
    fields = dict(re.findall(r"(\w+)=(\S*)", line))
    if "PartitionName" not in fields:
        return None
    most = fields.get("MaxNodes", "UNLIMITED")
    return Partition(
        name=fields["PartitionName"],
        default=fields.get("Default") == "YES",
        state=fields.get("State", ""),
        max_time=duration(fields.get("MaxTime", "")),
        default_time=duration(fields.get("DefaultTime", "")),
        max_nodes=int(most) if most.isdigit() else None,
        node_count=int(fields.get("TotalNodes", "0")),
        fields=fields,
    )


def _nodes(line: str) -> Nodes | None:
    parts = line.split("|")
    if len(parts) != 8:
        return None
    partition, gres, cpus, memory, state, count, names, features = parts
    return Nodes(
        partition=partition,
        gpus=gpus_of(gres),
        cpus=int(cpus.rstrip("+")),
        memory=int(memory.rstrip("+")) * MIB,
        state=re.sub(r"[^a-z_]+$", "", state.lower()),
        count=int(count),
        names=names,
        features=frozenset(features.split(",")) - {"(null)", ""},
    )


def default_memory(site_: Site, partition: Partition, cpus: int, gpus: int = 0) -> tuple[int, str] | None:
    """Return (bytes per node, why) for a job that requests no memory, or None if it gets all of it."""
    gpu = re.search(r"DefMemPerGPU=(\d+)", partition.fields.get("JobDefaults", ""))
    if gpu is not None and gpus:
        return int(gpu[1]) * gpus * MIB, f"{gpu[0]} for {gpus} GPUs"
    for fields in (partition.fields, site_.config):
        node, cpu = fields.get("DefMemPerNode", ""), fields.get("DefMemPerCPU", "")
        if node.isdigit() and int(node):
            return int(node) * MIB, f"DefMemPerNode={node}"
        if cpu.isdigit() and int(cpu):
            return int(cpu) * cpus * MIB, f"DefMemPerCPU={cpu} for {cpus} CPUs"
    return None


def gpus_of(gres: str) -> tuple[tuple[str, int], ...]:
    """`gpu:a100:4(S:0-1),gpu:v100:2,nvme:1` -> (("a100", 4), ("v100", 2))."""
    counts: dict[str, int] = {}
    for item in re.sub(r"\([^()]*\)", "", gres).split(","):
        match = re.fullmatch(r"gpu(?::([A-Za-z0-9][^:]*?))?:(\d+)", item.strip())
        if match is not None:
            counts[match[1] or ""] = counts.get(match[1] or "", 0) + int(match[2])
    return tuple(counts.items())

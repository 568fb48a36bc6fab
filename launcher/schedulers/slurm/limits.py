"""Limits of a QOS or an association that one job exceeds on its own, so that it would wait forever.

The order is Slurm's (acct_policy.c, "Resource Limits" in its documentation): a limit of the partition's QOS
takes precedence over that of the job's QOS, unless the job's has the flag OverPartQOS. Both take precedence
over an association's. Of the accounts above the user's own, only the Grp limits apply; their other limits are
already shown with the user's association.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from launcher.schedulers.slurm.records import JobRecord, duration
from launcher.schedulers.slurm.site import Partition, Row, Site, allowed_qos, gpus_of
from launcher.spec.quantities import format_bytes, format_duration

SINGLE_JOB_COLUMNS = ("MaxTRES", "MaxTRESPerNode", "MaxTRESPU", "MaxTRESPA", "GrpTRES")
"Columns of TRES limits that a single job can exceed."


@dataclass(frozen=True)
class Requested:
    """The minimum that a job requests. What Slurm adds (whole cores, whole nodes) is not known in advance."""

    nodes: int
    per_node: Mapping[str, int]
    "Keys are Slurm's names: cpu, mem (bytes), gres/gpu, gres/gpu:TYPE."
    seconds: float | None = None

    def of(self, what: str, column: str) -> int:
        if what == "node":
            return self.nodes if column != "MaxTRESPerNode" else 0
        return self.per_node.get(what, 0) * (1 if column == "MaxTRESPerNode" else self.nodes)


@dataclass(frozen=True)
class Exceeded:
    """A limit that the job exceeds."""

    what: str
    "A TRES, or `time`."
    requested: float
    limit: float
    column: str
    owner: str

    @property
    def words(self) -> str:
        if self.what == "time":
            requested, limit = format_duration(int(self.requested)), format_duration(int(self.limit))
            return (
                f"{requested} asked for, {self.owner} allows {limit} ({self.column}): ask for no more; "
                "training continues in the next job by itself"
            )
        where = "on each node" if self.column == "MaxTRESPerNode" else "in all"
        return (
            f"{_amount(self.what, self.requested)} {where}, {self.owner} gives "
            f"{_amount(self.what, self.limit, bare=True)} ({self.column}): ask for no more, or use another "
            "QOS or account"
        )


def exceeded(
    requested: Requested, site: Site, partition: Partition, account: str | None, qos: str | None
) -> list[Exceeded]:
    """Return the limits that the job exceeds.

    Return none if nothing is enforced or known, or if one of the accounts that the job may use accepts it.
    """
    if "limits" not in site.enforces or site.qos is None or site.associations is None:
        return []
    by_association = [
        list(
            _exceeded(
                requested,
                qos_rows(site, partition.qos, qos or default_qos(association)),
                association_and_parents(site, association),
            )
        )
        for association in associations(site, partition.name, account)
    ]
    return by_association[0] if by_association and all(by_association) else []


def associations(site: Site, partition: str, account: str | None) -> list[Row]:
    """Return the user's associations that the job may use, one per account.

    There may be several, because accounting does not report which one is the default.
    """
    chosen: dict[str, Row] = {}
    for row in site.own_associations:
        limited_to = row.get("Partition", "")
        if account not in (None, row["Account"]) or limited_to not in ("", partition):
            continue
        if limited_to or row["Account"] not in chosen:
            chosen[row["Account"]] = row
    return list(chosen.values())


def default_qos(association: Row) -> str:
    """Return the QOS of a job that requests none."""
    allowed = allowed_qos([association])
    return association.get("Def QOS", "") or (allowed[0] if len(allowed) == 1 else "normal")


def flags(site: Site, partition: Partition, account: str | None, qos: str | None) -> frozenset[str]:
    """Return the flags of every QOS that the job may get."""
    names = [qos] if qos else [default_qos(row) for row in associations(site, partition.name, account)]
    rows = [(site.qos or {}).get(name, {}) for name in names]
    return frozenset(flag for row in rows for flag in row.get("Flags", "").split(","))


Owned = tuple[str, Row]


def qos_rows(site: Site, of_partition: str, of_job: str) -> list[Owned]:
    """Return the rows of the partition's and the job's QOS. The first one that sets a limit decides."""
    rows, names = site.qos or {}, [of_partition, of_job]
    if "OverPartQOS" in rows.get(of_job, {}).get("Flags", "").split(","):
        names.reverse()
    return [(f"QOS {name}", rows[name]) for name in dict.fromkeys(names) if name in rows]


def association_and_parents(site: Site, association: Row) -> list[Owned]:
    """Return the user's association, then its account and the accounts above it, as far as they are known."""
    accounts = {row["Account"]: row for row in site.associations or () if not row.get("User")}
    name = association["Account"]
    above = [(f"account {one}", accounts[one]) for one in site.above(name) if one in accounts]
    return [(f"account {name}", association), *above]


def _exceeded(
    requested: Requested, of_qos: Sequence[Owned], of_account: Sequence[Owned]
) -> Iterator[Exceeded]:
    """Yield one exceeded limit per kind of resource."""
    done = set()
    for limit in (*_too_long(requested, of_qos, of_account), *_too_much(requested, of_qos, of_account)):
        if (kind := limit.what.rpartition(":")[0] or limit.what) not in done:
            done.add(kind)
            yield limit


def _too_long(
    requested: Requested, of_qos: Sequence[Owned], of_account: Sequence[Owned]
) -> Iterator[Exceeded]:
    for owner, row in (*of_qos, of_account[0]):
        wall = duration(row.get("MaxWall", ""))
        if wall is not None:
            if requested.seconds is not None and requested.seconds > wall:
                yield Exceeded("time", requested.seconds, wall, "MaxWall", owner)
            return


def _too_much(
    requested: Requested, of_qos: Sequence[Owned], of_account: Sequence[Owned]
) -> Iterator[Exceeded]:
    for column in SINGLE_JOB_COLUMNS:
        decided: set[str] = set()
        accounts = {"GrpTRES": of_account, "MaxTRESPU": (), "MaxTRESPA": ()}.get(column, of_account[:1])
        for owner, row in (*of_qos, *accounts):
            limits = {what: limit for what, limit in tres(row.get(column, "")).items() if what not in decided}
            for what, limit in limits.items():
                if (amount := requested.of(what, column)) > limit:
                    yield Exceeded(what, amount, limit, column, owner)
            if owner.startswith("QOS "):
                decided |= limits.keys()


def exceeds_alone(record: JobRecord, column: str, value: str) -> bool:
    """Return whether a queued job exceeds the limit `value` on its own; False if that is uncertain."""
    if column not in SINGLE_JOB_COLUMNS or record.node_count is None:
        return False
    nodes = record.node_count
    per_node = dict(_gres(record.gres))
    per_node["mem"] = tres(f"mem={record.memory}").get("mem", 0)  # may be per CPU; a node has at least one
    requested = Requested(nodes, per_node)
    for what, limit in tres(value).items():
        if what == "cpu" and column != "MaxTRESPerNode" and (record.cpus or 0) > limit:
            return True
        if requested.of(what, column) > limit:
            return True
    return False


def _gres(text: str) -> Iterator[tuple[str, int]]:
    """`gres:gpu:a100:4` -> gres/gpu 4, gres/gpu:a100 4."""
    gpus = gpus_of(re.sub(r"\bgres[:/]", "", text))
    yield "gres/gpu", sum(count for _, count in gpus)
    yield from ((f"gres/gpu:{name}", count) for name, count in gpus if name)


def tres(text: str) -> dict[str, int]:
    """`gres/gpu=2,mem=9G` -> numbers; memory in bytes."""
    amounts = {}
    for item in text.split(","):
        what, _, value = item.partition("=")
        match = re.fullmatch(r"(\d+)([KMGTP]?)", value)
        if match is not None and what == "mem":
            amounts[what] = int(match[1]) * 1024 ** ("KMGTP".index(match[2] or "M") + 1)
        elif match is not None and not match[2]:
            amounts[what] = int(match[1])
    return amounts


def _amount(what: str, number: float, bare: bool = False) -> str:
    if what == "mem":
        return format_bytes(int(number)) + ("" if bare else " of memory")
    if bare:
        return f"{number:.0f}"
    name, _, type_ = what.partition(":")
    return f"{number:.0f} {_NAMES[name]}{f' of type {type_}' if type_ else ''}"


_NAMES = {"node": "nodes", "cpu": "CPUs", "gres/gpu": "GPUs"}

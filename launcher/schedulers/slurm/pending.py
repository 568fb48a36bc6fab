"""Explain why a job is pending: Slurm's reason, the limit that it names, the expected start, what to do.

About two thirds of Slurm's reasons are limits of a QOS or an association. Their names are composed of parts,
which are parsed here. The other reasons are in reasons.py.
"""

from __future__ import annotations

import re
from datetime import datetime, timezone

from launcher.schedulers.slurm.limits import association_and_parents, associations, exceeds_alone, qos_rows
from launcher.schedulers.slurm.reasons import ADMIN, AGAIN, REASONS, SENTENCES, SMALLER, UNKNOWN
from launcher.schedulers.slurm.records import JobRecord
from launcher.schedulers.slurm.site import Site
from launcher.spec.quantities import format_duration

_LIMIT = re.compile(
    r"(QOS|Assoc|)(Grp|Max|Min)"
    r"(SubmitJobs?|Jobs?|WallDuration|Wall|CPU|Cpu|Memory|Mem|Node|GRES|License|Energy|BB|Billing|Unknown)"
    r"(RunMinutes|RunMins|Minutes|)(PerJob|PerNode|PerUser|PerAccount|)(?:Limit|NotSatisfied|)"
)
# Part of the reason -> (in words, its name in TRES lists).
_WHAT = {
    "CPU": ("CPUs", "cpu"),
    "Cpu": ("CPUs", "cpu"),
    "Mem": ("memory", "mem"),
    "Memory": ("memory", "mem"),
    "Node": ("nodes", "node"),
    "GRES": ("GPUs or other GRES", "gres/"),
    "License": ("licences", "license/"),
    "Energy": ("energy", "energy"),
    "BB": ("burst buffer", "bb/"),
    "Billing": ("billing units", "billing"),
    "Unknown": ("some resource", ""),
}


def why_pending(record: JobRecord, site: Site | None = None, now: datetime | None = None) -> str:
    """Explain in one line why the job is pending. With `site`, the line also states the limit's value."""
    words, advice = _explained(record, site or Site())
    parts = [words]
    estimate = _estimate(record, now or datetime.now(timezone.utc))
    if estimate:
        parts.append(estimate)
    parts.append(advice)
    return "; ".join(parts)


def needs_site(record: JobRecord) -> bool:
    """Return whether `why_pending` needs the site's partitions and limits to explain the reason."""
    word = record.reason.replace("_", " ").partition(",")[0].strip()
    return word.startswith("Partition") or _LIMIT.fullmatch(word) is not None


def _explained(record: JobRecord, site: Site) -> tuple[str, str]:
    reason = record.reason.replace("_", " ").strip()
    word, _, detail = reason.partition(",")
    if word in REASONS:
        words, advice = REASONS[word]
        words += _partition_limit(word, record, site)
        if detail.strip():
            words += f" (Slurm says: {detail.strip()})"
    elif (limit := _LIMIT.fullmatch(word)) is not None:
        words, advice = _limit(limit, record, site)
    else:
        sentences = (
            explanation for start, explanation in SENTENCES if reason.lower().startswith(start.lower())
        )
        who = re.search(r"\((\S+ (?:allows|denies) .*)\)$", reason)
        words, advice = next(sentences, (f"Slurm says {reason!r}", UNKNOWN) if reason else REASONS["None"])
        words += f" (Slurm says: {who[1]})" if who is not None else ""
    values = {
        "id": record.id,
        "account": record.account,
        "qos": record.qos,
        "partition": record.partition,
        "dependency": record.dependency,
    }
    return _fill(words, values), _fill(advice, values)


def _fill(text: str, values: dict[str, str]) -> str:
    """Insert `values` for `{name}`, and remove `({name})` if the value is empty."""
    for name, value in values.items():
        text = text.replace(f" ({{{name}}})", f" ({value})" if value else "").replace(f"{{{name}}}", value)
    return text


def _partition_limit(word: str, record: JobRecord, site: Site) -> str:
    partition = site.partitions.get(record.partition)
    if partition is None:
        return ""
    if word == "PartitionTimeLimit" and record.time_limit is not None and partition.max_time is not None:
        return f" ({_time(record.time_limit)} asked for, {partition.name} allows {_time(partition.max_time)})"
    if word == "PartitionNodeLimit":
        return f" ({record.node_count or '?'} asked for, {partition.name} gives {partition.most_nodes})"
    if word in ("PartitionDown", "PartitionInactive"):
        return f" ({partition.name} is {partition.state})"
    return ""


def _limit(limit: re.Match[str], record: JobRecord, site: Site) -> tuple[str, str]:
    """Describe a limit of a QOS or an association, with its value if accounting reports it."""
    where, kind, what, minutes, per = limit.groups()
    column, tres = _column(kind, what, minutes, per, qos=where != "Assoc")
    owner, value = _value(where, column, tres, record, site)
    each = {
        "PerJob": "a job",
        "PerNode": "a job on one node",
        "PerUser": "each user",
        "PerAccount": "each account",
    }
    subject = {"Assoc": "your account"}.get(where, "its QOS")
    if what.startswith("Submit"):
        thing = "jobs in the queue"
    elif what.startswith("Job"):
        thing = "running jobs"
    elif what.startswith("Wall"):
        thing = "time"
    else:
        thing = _WHAT[what][0]
    if minutes:
        thing = f"minutes of {thing}" + (" of the jobs that run" if minutes.startswith("Run") else "")
    if kind == "Min":
        words = f"it asks for fewer {thing} than the minimum of {subject}"
    elif kind == "Grp":
        words = f"{subject} has reached its limit of {thing} for all its jobs together"
    else:
        words = f"{subject} limits {thing}" + (f" for {each[per]}" if per else "")
    if value:
        words += f" ({owner}: {column} {value})"
    advice = _advice(kind, what, minutes, per)
    if per not in ("PerJob", "PerNode") and exceeds_alone(record, column, value):
        advice = "this job alone exceeds the limit and can never start: " + AGAIN
    return f"{words} [{record.reason}]", advice


def _advice(kind: str, what: str, minutes: str, per: str) -> str:
    if kind == "Min":
        return "ask for more, or use another QOS"
    if what.startswith("Wall") and kind == "Max":
        return "submit it again with a shorter resources.time: training continues in the next job by itself"
    if minutes.startswith("Run"):
        return "ask for a shorter resources.time or fewer GPUs, or wait until running jobs are further on"
    if minutes or what.startswith("Wall"):
        return "the minutes of this limit are used up for now: " + ADMIN
    if per in ("PerJob", "PerNode"):
        return "this job can never start: " + AGAIN
    return SMALLER if kind == "Max" else "wait until other jobs under this limit have ended, or ask for less"


def _column(kind: str, what: str, minutes: str, per: str, *, qos: bool) -> tuple[str, str]:
    """Return the column in sacctmgr's output, and the name within its list of TRES."""
    suffix = {"PerUser": "PU", "PerAccount": "PA"}.get(per, "")
    if what.startswith("Submit"):
        return ("GrpSubmit" if kind == "Grp" else f"MaxSubmit{suffix or ('PU' if qos else '')}"), ""
    if what.startswith("Job"):
        return ("GrpJobs" if kind == "Grp" else f"MaxJobs{suffix or ('PU' if qos else '')}"), ""
    if what.startswith("Wall"):
        return f"{kind}Wall", ""
    tres = _WHAT[what][1]
    if kind == "Min":
        return "MinTRES", tres
    if minutes.startswith("Run"):
        return f"{kind}TRESRunMins{suffix}", tres
    if minutes:
        return f"{kind}TRESMins{suffix}", tres
    return f"{kind}TRES{'PerNode' if per == 'PerNode' else suffix}", tres


def _value(where: str, column: str, tres: str, record: JobRecord, site: Site) -> tuple[str, str]:
    """Return (owner, value) of the limit, ("", "") if unknown."""
    if where == "Assoc":
        own = associations(site, record.partition, record.account)
        rows = association_and_parents(site, own[0] if own else {"Account": record.account})
    else:
        partition = site.partitions.get(record.partition)
        rows = qos_rows(site, partition.qos if partition else "", record.qos)
    for owner, row in rows:
        items = [item for item in row.get(column, "").split(",") if item and item.startswith(tres)]
        if items:
            return owner, ",".join(items)
    return "", ""


def _estimate(record: JobRecord, now: datetime) -> str:
    if record.start is None:
        return ""
    wait = (record.start - now).total_seconds()
    begin_time = record.reason == "BeginTime"
    if wait <= 60:
        return "that is within a minute" if begin_time else "Slurm plans to start it now"
    within = f"{format_duration(round(wait / 60) * 60)} ({record.start.astimezone():%Y-%m-%d %H:%M})"
    if begin_time:
        return f"that is in {within}"
    return f"Slurm plans to start it in {within}, or earlier"


def _time(seconds: float) -> str:
    return "no limit" if seconds == float("inf") else format_duration(int(seconds))

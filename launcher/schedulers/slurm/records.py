"""What Slurm knows of jobs: one round trip for any number, from text that 20.11 to 25.x print alike."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone

from launcher.schedulers.over_ssh.login import NOT_FOUND, Answer

RUNAWAY = "RUNAWAY"
"Slurm's word for a job that accounting takes for alive and the controller does not know."


@dataclass(frozen=True)
class JobRecord:
    """One Slurm job, or one task of an array. Times are UTC."""

    id: str
    "`123`, or `123_4` for a task of an array."
    state: str
    "Slurm's word, one of states.SLURM_STATES."
    reason: str = ""
    "Slurm's word for why it waits; empty for a job that has started."
    exit_code: int | None = None
    signal: int | None = None
    restarts: int | None = None
    partition: str = ""
    nodes: str = ""
    "As Slurm writes a list of hosts: `n[1-3,7]`."
    submitted: datetime | None = None
    start: datetime | None = None
    "Slurm's estimate while it waits."
    end: datetime | None = None
    time_limit: float | None = None
    "Seconds; infinity for UNLIMITED."
    elapsed: float | None = None
    "Seconds since its latest start."
    comment: str = ""
    command: str | None = None
    "The script with its arguments, as sbatch got them; empty without a file. Accounting does not tell."
    name: str = ""
    "Of the job, where only accounting tells of it."
    cancelled_by: int | None = None
    "User id, where accounting tells."
    account: str = ""
    qos: str = ""
    node_count: int | None = None
    cpus: int | None = None
    memory: str = ""
    "Asked for, as Slurm writes it: of a node, or of a CPU."
    gres: str = ""
    "Asked for on each node: `gres/gpu:a100:4`."
    dependency: str = ""
    priority: int | None = None


NOT_ASKED = Answer(0, "", "")
NO_ACCOUNTING = "this cluster keeps no accounting: Slurm forgets a job some minutes after its end"


@dataclass(frozen=True)
class Records:
    """The answers, and why one of them is missing."""

    jobs: Mapping[str, JobRecord] = field(default_factory=dict)
    controller: str = ""
    "Why the controller did not answer; empty where it did."
    accounting: str = ""
    "Why accounting did not answer, or is not there; empty where it did."

    def get(self, job: str) -> JobRecord | None:
        """Tasks that were cancelled before they began are one record together, with their array's id."""
        array, of_array, _ = job.partition("_")
        rest = self.jobs.get(array) if of_array else None
        if job not in self.jobs and rest is not None and rest.state == "CANCELLED":
            return replace(rest, id=job)
        return self.jobs.get(job)

    @property
    def silent(self) -> str:
        """Why a job that is not here may be known to Slurm all the same."""
        return "" if self.accounting == NO_ACCOUNTING else self.accounting

    @property
    def trouble(self) -> str:
        return "; ".join(filter(None, (self.controller, self.accounting)))


_SQUEUE = (
    *("id", "state", "partition", "nodes", "submitted", "start", "end", "time_limit", "elapsed", "account"),
    *("qos", "node_count", "cpus", "memory", "gres", "dependency", "priority", "reason", "comment"),
)
_SQUEUE_FORMAT = "%i|%T|%P|%N|%V|%S|%e|%l|%M|%a|%q|%D|%C|%m|%b|%E|%Q|%r|%k|%o"
_SACCT = (
    *("id", "state", "exit", "partition", "nodes", "submitted", "start", "end", "time_limit", "elapsed"),
    *("account", "qos", "node_count", "cpus", "comment"),
)
_SACCT_FORMAT = (
    "JobID,State,ExitCode,Partition,NodeList,Submit,Start,End,Timelimit,Elapsed,"
    "Account,QOS,NNodes,NCPUS,Comment,JobName"
)
# A comment may hold the bar that parts the fields: it is read last, with the one field behind it.
# Times in UTC whatever the login node's zone, nobody's own filters on what squeue shows, long lists of tasks.
_FILTERS = ("ACCOUNT", "LICENSES", "NAMES", "PARTITION", "QOS", "STATES", "USERS")
CLEAN = (
    *("env", *(word for name in _FILTERS for word in ("-u", f"SQUEUE_{name}"))),
    *("TZ=UTC0", "SLURM_TIME_FORMAT=standard", "SLURM_BITSTR_LEN=0"),
)
_FEW = 4  # scontrol takes one job at a time
ACCOUNTING_SECONDS = 3
"How long slurmdbd is waited for. What hangs there costs sacct and sacctmgr 30 s and more, and is optional."
BOUNDED = ("timeout", "--kill-after=1", str(ACCOUNTING_SECONDS))
_CUT = (124, 137)
"Exit codes of `timeout` for a command that it ended."


Put = Callable[[Mapping[str, Sequence[str]]], Mapping[str, Answer]]
"Asks commands in one round trip, as `login.ask` does."


def look_up(put: Put, ids: Sequence[str], stopped: Collection[str] = ()) -> Records:
    """What Slurm knows of the jobs. The controller is asked for all of them; accounting, and the controller
    for details, only for those that it does not know or that have ended badly. `stopped`: jobs that the user
    has cancelled, so that nobody needs to be asked who did."""
    answers = dict(put(of_queue(ids)))
    known = records(answers)
    if more := of_past(known, ids, stopped):
        known = records({**answers, **put(more)})
    return known


def of_queue(ids: Sequence[str]) -> dict[str, list[str]]:
    """Of many jobs whole arrays are asked for: that keeps the command short."""
    return {"squeue": _squeue(ids if len(ids) <= _FEW else [_array(one) for one in ids])}


def of_past(known: Records, ids: Sequence[str], stopped: Collection[str] = ()) -> dict[str, list[str]]:
    """What is to be asked besides; nothing where the controller has told enough."""
    lost = [one for one in ids if known.get(one) is None]
    ended = {one: record.state for one in ids if (record := known.get(one)) is not None}
    bad = [one for one, state in ended.items() if state in _TOLD_IN_PART]
    bad = [one for one in bad if ended[one] != "CANCELLED" or one not in stopped]
    if not lost and not bad:
        return {}
    few = len(lost) + len(bad) <= _FEW
    # A task that was cancelled before it began is known with its array only.
    asked = [*(_array(one) for one in lost), *(bad if few else map(_array, bad))]
    commands = {
        "sacct": [
            *("sh", "-c", 'exec "$@" ${SLURM_CLUSTERS:+"--clusters=$SLURM_CLUSTERS"}', "sh"),
            *(*CLEAN, *BOUNDED, "sacct", "--noheader", "--parsable2", "--allocations"),
            *(f"--jobs={_listed(asked)}", f"--format={_SACCT_FORMAT}"),
        ]
    }
    arrays = [_array(one) for one in lost if "_" in one]
    if arrays and len(ids) <= _FEW and not known.controller:  # of more, whole arrays have been asked for
        commands["squeue of arrays"] = _squeue(arrays)
    if few:
        commands |= {f"scontrol {one}": [*CLEAN, "scontrol", "show", "job", one] for one in bad}
    return commands


def _squeue(ids: Sequence[str]) -> list[str]:
    clean = [*CLEAN, "squeue", "--noheader", "--array", "--states=all"]
    return [*clean, f"--jobs={_listed(ids)}", f"--format={_SQUEUE_FORMAT}"]


def _listed(ids: Sequence[str]) -> str:
    return ",".join(dict.fromkeys(ids))


def _array(job: str) -> str:
    return job.partition("_")[0]


def records(answers: Mapping[str, Answer]) -> Records:
    """The controller's word where it has one, accounting's for jobs it has forgotten.

    The controller forgets a job MinJobAge (300 s by default) after its end.
    """
    squeue, sacct = answers["squeue"], answers.get("sacct", NOT_ASKED)
    # Asked for one job that it does not know, squeue fails; asked for several, it leaves that one out.
    unknown = "Invalid job id" in squeue.err
    controller = "" if squeue.code == 0 or unknown else controller_trouble(squeue)
    accounting = "" if sacct.code == 0 else accounting_trouble(sacct)
    lines = [*squeue.out.splitlines(), *answers.get("squeue of arrays", NOT_ASKED).out.splitlines()]
    live = {job.id: job for job in map(_of_squeue, lines) if job is not None}
    past = {job.id: job for job in map(_of_sacct, sacct.out.splitlines()) if job is not None}
    jobs = {}
    for id_ in past.keys() | live.keys():
        if id_ in live:
            jobs[id_] = _with_past(live[id_], past.get(id_))
        elif "[" in id_:  # accounting has tasks of an array that never began in one line: `123_[2-9%4]`
            if controller or past[id_].state not in _ALIVE:
                others = (one for one in _tasks(id_) if one not in past and one not in live)
                jobs.update({one: replace(past[id_], id=one) for one in others})
        elif past[id_].state in _ALIVE and not controller:
            jobs[id_] = replace(past[id_], state=RUNAWAY)
        else:
            jobs[id_] = past[id_]
    for name, answer in answers.items():
        if name.startswith("scontrol ") and answer.code == 0:
            for id_, code, signal, restarts in _of_scontrol(answer.out):
                if id_ in live and live[id_].state in _BEFORE_END:
                    jobs[id_] = replace(jobs[id_], restarts=restarts)
                elif id_ in live:
                    jobs[id_] = replace(jobs[id_], exit_code=code, signal=signal, restarts=restarts)
    return Records(jobs, controller, accounting)


_ALIVE = ("PENDING", "RUNNING", "SUSPENDED", "REQUEUED", "RESIZING")
_WAITING = (
    "PENDING",
    "REQUEUE_HOLD",
    "SPECIAL_EXIT",
    "RESV_DEL_HOLD",
    "REQUEUED",
    "REQUEUE_FED",
    "EXPEDITING",
)
_TOLD_IN_PART = ("FAILED", "CANCELLED")
"squeue tells neither the exit code nor who cancelled."
_BEFORE_END = (*_WAITING, *_ALIVE, "CONFIGURING", "POWER_UP_NODE", "SIGNALING", "STOPPED", "UPDATE_DB")


def _tasks(id_: str) -> Iterator[str]:
    """The jobs of `123_[0-6:2,9%4]`."""
    array, _, listed = id_.rstrip("]").partition("_[")
    for part in listed.partition("%")[0].split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part)
        if found is not None:  # a list that is too long ends in `...`
            first, last, step = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
            yield from (f"{array}_{task}" for task in range(first, last + 1, step))


def _with_past(live: JobRecord, past: JobRecord | None) -> JobRecord:
    """squeue does not tell exit codes and who cancelled; of an earlier start they would be wrong."""
    if past is None or past.state != live.state:
        return live
    return replace(live, exit_code=past.exit_code, signal=past.signal, cancelled_by=past.cancelled_by)


def controller_trouble(answer: Answer) -> str:
    """Why a command that asks slurmctld failed."""
    if answer.code == NOT_FOUND:
        return "there are no Slurm commands here"
    return f"Slurm's controller does not answer: {_last_line(answer)}"


def accounting_trouble(answer: Answer) -> str:
    """Why sacct or sacctmgr failed, which many clusters live with."""
    if answer.code == NOT_FOUND or re.search("accounting storage is disabled", answer.err, re.IGNORECASE):
        return NO_ACCOUNTING
    if answer.code in _CUT:
        return f"Slurm's accounting gave no answer within {ACCOUNTING_SECONDS} s"
    return f"Slurm's accounting does not answer: {_last_line(answer)}"


def _last_line(answer: Answer) -> str:
    lines = (answer.err or answer.out).strip().splitlines()
    return lines[-1] if lines else f"exit code {answer.code}"


def _of_squeue(line: str) -> JobRecord | None:
    values = dict(zip(_SQUEUE, line.split("|", len(_SQUEUE) - 1), strict=False))
    if len(values) < len(_SQUEUE):
        return None
    comment, _, command = values["comment"].rpartition("|")
    told = command.startswith(("/", "(null)"))
    job = _common({**values, "comment": comment if told else values["comment"]})
    job = replace(job, command=_given(command) if told else None)
    waits = job.state in _WAITING
    return replace(
        job,
        reason=_given(values["reason"]) if waits else "",
        end=None if waits else job.end,
        memory=_given(values["memory"]),
        gres=_given(values["gres"]),
        dependency=_given(values["dependency"]),
        priority=_whole(values["priority"]),
    )


def _of_sacct(line: str) -> JobRecord | None:
    values = dict(zip(_SACCT, line.split("|", len(_SACCT) - 1), strict=False))
    if len(values) < len(_SACCT):
        return None
    state, _, by = values["state"].partition(" by ")
    code, signal = _exit(values["exit"])
    comment, bar, name = values["comment"].rpartition("|")
    job = _common({**values, "state": state, "comment": comment if bar else name})
    job = replace(job, name=name if bar else "")
    if job.state in _BEFORE_END:
        return job
    return replace(job, exit_code=code, signal=signal, cancelled_by=_whole(by))


def _common(values: Mapping[str, str]) -> JobRecord:
    return JobRecord(
        id=values["id"],
        state=values["state"].split(" ")[0].rstrip("+"),
        partition=values["partition"],
        nodes=_given(values["nodes"]).replace("None assigned", ""),
        submitted=moment(values["submitted"]),
        start=moment(values["start"]),
        end=moment(values["end"]),
        time_limit=duration(values["time_limit"]),
        elapsed=duration(values["elapsed"]),
        comment=_given(values["comment"]),
        account=_given(values["account"]),
        qos=_given(values["qos"]),
        node_count=_whole(values["node_count"]),
        cpus=_whole(values["cpus"]),
    )


def _of_scontrol(text: str) -> list[tuple[str, int | None, int | None, int | None]]:
    """(id, exit code, signal, restarts) of each record of `scontrol show job`.

    Records are parted by an empty line. The first line of each holds the job's name, which may look like
    any other field, and is read no further than the ids.
    """
    found = []
    for record in text.split("\n\n"):
        first, _, rest = record.strip().partition("\n")
        head = re.match(r"JobId=(\d+)(?: ArrayJobId=(\d+) ArrayTaskId=(\d+)\b)?", first)
        restarts = re.search(r"^ .*\bRestarts=(\d+)", rest, re.MULTILINE)
        exit_code = re.search(r"^ .*\bExitCode=(\d+:\d+)", rest, re.MULTILINE)
        if head is None or exit_code is None:
            continue
        id_ = f"{head[2]}_{head[3]}" if head[2] else head[1]
        code, signal = _exit(exit_code[1])
        found.append((id_, code, signal, int(restarts[1]) if restarts else None))
    return found


def _exit(text: str) -> tuple[int | None, int | None]:
    """`1:0` -> (1, None); `0:9` -> (0, 9)."""
    code, _, signal = text.partition(":")
    return _whole(code), _whole(signal) or None


def moment(text: str) -> datetime | None:
    """Slurm's `2026-11-21T23:02:12`, printed in UTC; None for `Unknown`, `N/A` and `None`."""
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%S").replace(tzinfo=timezone.utc)
    except ValueError:
        return None


_CLOCK = (3600, 60, 1)


def duration(text: str) -> float | None:
    """Seconds of `5:00`, `1:00:00`, `2-00:00:00`, `90` (minutes), UNLIMITED; None where nothing is set."""
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return float("inf")
    found = re.fullmatch(r"(?:(\d+)-)?(\d+(?::\d+){0,2})(?:\.\d+)?", text)
    if found is None:
        return None
    days, clock = int(found[1] or 0), [int(part) for part in found[2].split(":")]
    # After a day come hours first; without one, minutes stand alone or before the seconds.
    units = _CLOCK if found[1] is not None else (60,) if len(clock) == 1 else _CLOCK[-len(clock) :]
    return days * 86400.0 + sum(value * unit for value, unit in zip(clock, units, strict=False))


def _given(text: str) -> str:
    return "" if text.strip() in ("", "(null)", "N/A", "n/a", "None", "Unknown") else text.strip()


def _whole(text: str) -> int | None:
    return int(text) if text.isdigit() else None

"""Query Slurm's records of any number of jobs in one round trip, in a format common to 20.11 to 25.x."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone

from launcher.schedulers.login import NOT_FOUND, Answer, last_line

RUNAWAY = "RUNAWAY"
"Slurm's word for a job that is alive in accounting but unknown to the controller."


@dataclass(frozen=True)
class JobRecord:
    """One Slurm job, or one task of an array. Times are UTC."""

    id: str
    "`123`, or `123_4` for a task of an array."
    state: str
    "Slurm's word, one of states.SLURM_STATES."
    reason: str = ""
    "Slurm's word for why the job is pending; empty once it has started."
    exit_code: int | None = None
    signal: int | None = None
    partition: str = ""
    nodes: str = ""
    "Slurm's notation for a list of hosts: `n[1-3,7]`."
    submitted: datetime | None = None
    start: datetime | None = None
    "Slurm's estimate while the job is pending."
    end: datetime | None = None
    time_limit: float | None = None
    "Seconds; infinity for UNLIMITED."
    comment: str = ""
    command: str | None = None
    "The script and its arguments as sbatch got them; empty without a file, None from accounting."
    name: str = ""
    "The job's name; set only if the record comes from accounting alone."
    cancelled_by: int | None = None
    "User id, if accounting has it."
    account: str = ""
    qos: str = ""
    node_count: int | None = None
    cpus: int | None = None
    memory: str = ""
    "Memory asked for, in Slurm's notation: per node or per CPU."
    gres: str = ""
    "GRES asked for on each node: `gres/gpu:a100:4`."
    dependency: str = ""


NOT_ASKED = Answer(0, "", "")
NO_ACCOUNTING = "this cluster keeps no accounting: Slurm forgets a job some minutes after its end"


@dataclass(frozen=True)
class Records:
    """The job records that Slurm returned, and why an answer is missing."""

    jobs: Mapping[str, JobRecord] = field(default_factory=dict)
    controller: str = ""
    "Why the controller did not answer; empty if it did."
    accounting: str = ""
    "Why accounting did not answer, or that it does not exist; empty if it answered."

    def get(self, job: str) -> JobRecord | None:
        """Return the record of a job. Tasks cancelled before they began share the record of their array."""
        array, of_array, _ = job.partition("_")
        rest = self.jobs.get(array) if of_array else None
        if job not in self.jobs and rest is not None and rest.state == "CANCELLED":
            return replace(rest, id=job)
        return self.jobs.get(job)

    def left_array(self, job: str) -> bool:
        """Return whether controller and accounting know the job's array but not this task.

        A task cancelled while it waits has no record as long as other tasks of its array wait (22.05).
        """
        array, of_array, _ = job.partition("_")
        knows = any(array_of(other) == array for other in self.jobs)
        return bool(of_array) and knows and not self.trouble and self.get(job) is None

    @property
    def silent(self) -> str:
        """Why a job that is missing here may still be known to Slurm."""
        return "" if self.accounting == NO_ACCOUNTING else self.accounting

    @property
    def trouble(self) -> str:
        return "; ".join(filter(None, (self.controller, self.accounting)))


_SQUEUE = (
    *("id", "state", "partition", "nodes", "submitted", "start", "end", "time_limit", "account"),
    *("qos", "node_count", "cpus", "memory", "gres", "dependency", "reason", "comment"),
)
_SQUEUE_FORMAT = "%i|%T|%P|%N|%V|%S|%e|%l|%a|%q|%D|%C|%m|%b|%E|%r|%k|%o"
_SACCT = (
    *("id", "state", "exit", "partition", "nodes", "submitted", "start", "end", "time_limit"),
    *("account", "qos", "node_count", "cpus", "comment"),
)
_SACCT_FORMAT = (
    "JobID,State,ExitCode,Partition,NodeList,Submit,Start,End,Timelimit,"
    "Account,QOS,NNodes,NCPUS,Comment,JobName"
)
# A comment may contain the bar that separates the fields, so it comes last, with only one field after it.
# Print times in UTC whatever the login node's time zone is, ignore the user's squeue filters, and do not
# abbreviate long task lists.
_FILTERS = ("ACCOUNT", "LICENSES", "NAMES", "PARTITION", "QOS", "STATES", "USERS")
CLEAN = (
    *("env", *(word for name in _FILTERS for word in ("-u", f"SQUEUE_{name}"))),
    *("TZ=UTC0", "SLURM_TIME_FORMAT=standard", "SLURM_BITSTR_LEN=0"),
)
_FEW = 4  # scontrol accepts one job at a time
ACCOUNTING_SECONDS = 3
"Timeout for slurmdbd, which is optional. If it hangs, sacct and sacctmgr would take 30 s and more."
BOUNDED = ("timeout", "--kill-after=1", str(ACCOUNTING_SECONDS))
_TIMED_OUT = (124, 137)
"Exit codes of `timeout` when it ends the command."


RunCommands = Callable[[Mapping[str, Sequence[str]]], Mapping[str, Answer]]
"Runs commands in one round trip, like `login.ask`."


def look_up(run_commands: RunCommands, ids: Sequence[str], stopped: Collection[str] = ()) -> Records:
    """Query Slurm's records of the jobs.

    Query the controller for all jobs. Query accounting, and the controller's details, only for jobs that the
    controller does not know or that failed. `stopped` holds jobs that this user has cancelled, for which no
    query needs to find out who did.
    """
    answers = dict(run_commands(queue_query(ids)))
    records_ = records(answers)
    if commands := further_queries(records_, ids, stopped):
        records_ = records({**answers, **run_commands(commands)})
    return records_


def queue_query(ids: Sequence[str]) -> dict[str, list[str]]:
    """Return the query to the controller. For many jobs it names whole arrays, which keeps it short."""
    return {"squeue": _squeue(ids if len(ids) <= _FEW else [array_of(id_) for id_ in ids])}


def further_queries(
    known: Records, ids: Sequence[str], stopped: Collection[str] = ()
) -> dict[str, list[str]]:
    """Return the further queries that are needed; none if the controller has reported enough."""
    lost = [id_ for id_ in ids if known.get(id_) is None]
    ended = {id_: record.state for id_ in ids if (record := known.get(id_)) is not None}
    failed = [id_ for id_, state in ended.items() if state in _NEED_DETAILS]
    failed = [id_ for id_ in failed if ended[id_] != "CANCELLED" or id_ not in stopped]
    if not lost and not failed:
        return {}
    few = len(lost) + len(failed) <= _FEW
    # A task that was cancelled before it began is recorded only with its array.
    ids_to_query = [*(array_of(id_) for id_ in lost), *(failed if few else map(array_of, failed))]
    commands = {
        "sacct": [
            *("sh", "-c", 'exec "$@" ${SLURM_CLUSTERS:+"--clusters=$SLURM_CLUSTERS"}', "sh"),
            *(*CLEAN, *BOUNDED, "sacct", "--noheader", "--parsable2", "--allocations"),
            *(f"--jobs={_listed(ids_to_query)}", f"--format={_SACCT_FORMAT}"),
        ]
    }
    arrays = [array_of(id_) for id_ in lost if "_" in id_]
    if (
        arrays and len(ids) <= _FEW and not known.controller
    ):  # for more jobs, whole arrays were queried already
        commands["squeue of arrays"] = _squeue(arrays)
    if few:
        commands |= {f"scontrol {id_}": [*CLEAN, "scontrol", "show", "job", id_] for id_ in failed}
    return commands


def _squeue(ids: Sequence[str]) -> list[str]:
    clean = [*CLEAN, "squeue", "--noheader", "--array", "--states=all"]
    return [*clean, f"--jobs={_listed(ids)}", f"--format={_SQUEUE_FORMAT}"]


def _listed(ids: Sequence[str]) -> str:
    return ",".join(dict.fromkeys(ids))


def array_of(job: str) -> str:
    """Return the id of the array that `job` is a task of, or `job` itself."""
    return job.partition("_")[0]


def records(answers: Mapping[str, Answer]) -> Records:
    """Merge the answers. Accounting's record is used if the controller has forgotten the job.

    The controller forgets a job MinJobAge (300 s by default) after its end.
    """
    squeue, sacct = answers["squeue"], answers.get("sacct", NOT_ASKED)
    # squeue fails if the only job asked for is unknown, and leaves out unknown ones among several.
    unknown = "Invalid job id" in squeue.err
    controller = "" if squeue.code == 0 or unknown else controller_trouble(squeue)
    accounting = "" if sacct.code == 0 else accounting_trouble(sacct)
    lines = [*squeue.out.splitlines(), *answers.get("squeue of arrays", NOT_ASKED).out.splitlines()]
    live = {job.id: job for job in map(_parse_squeue, lines) if job is not None}
    past = {job.id: job for job in map(_parse_sacct, sacct.out.splitlines()) if job is not None}
    jobs = {}
    for id_ in past.keys() | live.keys():
        if id_ in live:
            jobs[id_] = _with_past(live[id_], past.get(id_))
        elif "[" in id_:  # accounting lists array tasks that never began in one line: `123_[2-9%4]`
            if controller or past[id_].state not in _ALIVE:
                others = (task for task in _tasks(id_) if task not in past and task not in live)
                jobs.update({task: replace(past[id_], id=task) for task in others})
        elif past[id_].state in _ALIVE and not controller:
            jobs[id_] = replace(past[id_], state=RUNAWAY)
        else:
            jobs[id_] = past[id_]
    for name, answer in answers.items():
        if name.startswith("scontrol ") and answer.code == 0:
            for id_, code, signal in _parse_scontrol(answer.out):
                if id_ in live and live[id_].state not in _BEFORE_END:
                    jobs[id_] = replace(jobs[id_], exit_code=code, signal=signal)
    return Records(jobs, controller, accounting)


_ALIVE = ("PENDING", "RUNNING", "SUSPENDED", "REQUEUED", "RESIZING")
_HELD = ("REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_WAITING = ("PENDING", *_HELD, "REQUEUED", "REQUEUE_FED", "EXPEDITING")
_NEED_DETAILS = ("FAILED", "CANCELLED")
"squeue reports neither the exit code nor who cancelled the job."
_BEFORE_END = (*_WAITING, *_ALIVE, "CONFIGURING", "POWER_UP_NODE", "SIGNALING", "STOPPED", "UPDATE_DB")


def _tasks(id_: str) -> Iterator[str]:
    """Yield the ids of the tasks in `123_[0-6:2,9%4]`."""
    array, _, listed = id_.rstrip("]").partition("_[")
    for part in listed.partition("%")[0].split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part)
        if match is not None:  # Slurm truncates a long list with `...`
            first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
            yield from (f"{array}_{task}" for task in range(first, last + 1, step))


def _with_past(live: JobRecord, past: JobRecord | None) -> JobRecord:
    """Add what squeue lacks: exit codes and who cancelled.

    Accounting's values of an earlier start are skipped.
    """
    if past is None or past.state != live.state:
        return live
    return replace(live, exit_code=past.exit_code, signal=past.signal, cancelled_by=past.cancelled_by)


def controller_trouble(answer: Answer) -> str:
    """Return why a command to slurmctld failed."""
    if answer.code == NOT_FOUND:
        return "there are no Slurm commands here"
    return f"Slurm's controller does not answer: {_why(answer)}"


def accounting_trouble(answer: Answer) -> str:
    """Return why sacct or sacctmgr failed. Many clusters run without accounting."""
    if answer.code == NOT_FOUND or re.search("accounting storage is disabled", answer.err, re.IGNORECASE):
        return NO_ACCOUNTING
    if answer.code in _TIMED_OUT:
        return f"Slurm's accounting gave no answer within {ACCOUNTING_SECONDS} s"
    return f"Slurm's accounting does not answer: {_why(answer)}"


def _why(answer: Answer) -> str:
    return last_line(answer.err or answer.out) or f"exit code {answer.code}"


def _parse_squeue(line: str) -> JobRecord | None:
    values = dict(zip(_SQUEUE, line.split("|", len(_SQUEUE) - 1), strict=False))
    if len(values) < len(_SQUEUE):
        return None
    comment, _, command = values["comment"].rpartition("|")
    has_command = command.startswith(("/", "(null)"))
    job = _common({**values, "comment": comment if has_command else values["comment"]})
    job = replace(job, command=_value_or_empty(command) if has_command else None)
    waits = job.state in _WAITING
    return replace(
        job,
        reason=_value_or_empty(values["reason"]) if waits else "",
        end=None if waits else job.end,
        memory=_value_or_empty(values["memory"]),
        gres=_value_or_empty(values["gres"]),
        dependency=_value_or_empty(values["dependency"]),
    )


def _parse_sacct(line: str) -> JobRecord | None:
    values = dict(zip(_SACCT, line.split("|", len(_SACCT) - 1), strict=False))
    if len(values) < len(_SACCT):
        return None
    state, _, cancelled_by = values["state"].partition(" by ")
    code, signal = _exit(values["exit"])
    comment, bar, name = values["comment"].rpartition("|")
    job = _common({**values, "state": state, "comment": comment if bar else name})
    job = replace(job, name=name if bar else "")
    if job.state in _BEFORE_END:
        return job
    return replace(job, exit_code=code, signal=signal, cancelled_by=_int_or_none(cancelled_by))


def _common(values: Mapping[str, str]) -> JobRecord:
    return JobRecord(
        id=values["id"],
        state=values["state"].split(" ")[0].rstrip("+"),
        partition=values["partition"],
        nodes=_value_or_empty(values["nodes"]).replace("None assigned", ""),
        submitted=moment(values["submitted"]),
        start=moment(values["start"]),
        end=moment(values["end"]),
        time_limit=duration(values["time_limit"]),
        comment=_value_or_empty(values["comment"]),
        account=_value_or_empty(values["account"]),
        qos=_value_or_empty(values["qos"]),
        node_count=_int_or_none(values["node_count"]),
        cpus=_int_or_none(values["cpus"]),
    )


def _parse_scontrol(text: str) -> Iterator[tuple[str, int | None, int | None]]:
    """Yield (id, exit code, signal) of each record of `scontrol show job`.

    Records are separated by an empty line. The first line of a record contains the job's name, which may look
    like any other field, so only its ids are parsed.
    """
    for record in text.split("\n\n"):
        first, _, rest = record.strip().partition("\n")
        head = re.match(r"JobId=(\d+)(?: ArrayJobId=(\d+) ArrayTaskId=(\d+)\b)?", first)
        exit_code = re.search(r"^ .*\bExitCode=(\d+:\d+)", rest, re.MULTILINE)
        if head is not None and exit_code is not None:
            yield (f"{head[2]}_{head[3]}" if head[2] else head[1], *_exit(exit_code[1]))


def _exit(text: str) -> tuple[int | None, int | None]:
    """`1:0` -> (1, None); `0:9` -> (0, 9)."""
    code, _, signal = text.partition(":")
    return _int_or_none(code), _int_or_none(signal) or None


def moment(text: str) -> datetime | None:
    """Parse Slurm's `2026-11-21T23:02:12` in UTC. None for `Unknown`, `N/A` and `None`."""
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%S").replace(tzinfo=timezone.utc)
    except ValueError:
        return None


_CLOCK = (3600, 60, 1)


def duration(text: str) -> float | None:
    """Return the seconds of `5:00`, `1:00:00`, `2-00:00:00`, `90` (minutes) or UNLIMITED; None if unset."""
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return float("inf")
    match = re.fullmatch(r"(?:(\d+)-)?(\d+(?::\d+){0,2})(?:\.\d+)?", text)
    if match is None:
        return None
    days, clock = int(match[1] or 0), [int(part) for part in match[2].split(":")]
    # With days, the clock starts with hours. Without, it is minutes alone or ends in minutes and seconds.
    units = _CLOCK if match[1] is not None else (60,) if len(clock) == 1 else _CLOCK[-len(clock) :]
    return days * 86400.0 + sum(value * unit for value, unit in zip(clock, units, strict=False))


def _value_or_empty(text: str) -> str:
    return "" if text.strip() in ("", "(null)", "N/A", "n/a", "None", "Unknown") else text.strip()


def _int_or_none(text: str) -> int | None:
    return int(text) if text.isdigit() else None

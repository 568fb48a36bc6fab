"""Judge how an attempt ended: first from the ranks' records, then from log patterns and exit codes."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from launcher.diagnosis.cause import Candidate, Cause, cause_of, clue_of_exception
from launcher.diagnosis.clue import CLASS_OF as CLASS_OF_KIND
from launcher.diagnosis.clue import KIND_OF, MEMORY_OF, Clue, clue_of, order_of
from launcher.diagnosis.collector import NAMED, shortened
from launcher.diagnosis.fsdp_collective_order import problem_of
from launcher.diagnosis.memory import CLASS_OF, out_of_memory, sizes
from launcher.diagnosis.patterns import FILE_SYSTEM_FAILED, PORT_TAKEN
from launcher.rundir.files import read_record
from launcher.rundir.layout import AttemptDir
from launcher.rundir.record_forms import ERROR, EXIT
from launcher.spec.failures import FAILURES
from launcher.spec.quantities import format_bytes
from launcher.spec.signals import signal_name
from launcher.spec.verdict import (
    EXIT_FOLLOWED,
    EXIT_STOPPED,
    FETCHED,
    STILL_FETCHING,
    FailureClass,
    OutOfMemory,
    Seen,
    Verdict,
)

_NETWORK: frozenset[FailureClass | None] = frozenset({"nccl-timeout", "rendezvous-failed"})

# A rank with one of these was a victim of another rank, unless no other cause is known.
_CONSEQUENCE_CLASSES = _NETWORK | {None}

LEAVING_SECONDS = 5.0
"Maximum time between a program closing its connections and its end. Finalizing Python with torch is slow."

_WORKER_KILLED = 128 + signal.SIGKILL
"Exit code of `local_ranks` if the first worker that ended was killed."

_KILLED = frozenset({-signal.SIGKILL, 128 + signal.SIGKILL})
"Exit codes of a killed process, and of a shell whose program was killed."

_ENDED_AS_ASKED = frozenset(
    code for signum in (signal.SIGTERM, signal.SIGHUP) for code in (-signum, 128 + signum)
)
"Exit codes of a program that the request to stop ended, and of its shell."

_CRASHES = frozenset({-signal.SIGABRT, -signal.SIGSEGV})
"Exit codes of a process that crashes. A library may crash during the shutdown after an exception."

_CRASHED = "Fatal Python error: "
"Begins what faulthandler prints when a process crashes. Its frames follow, the innermost first."
_FRAME = re.compile(r'\s*File ".*", line \d+ in \S+$')

EXIT_NOT_STARTED = 78
"Exit code of start.sh if it can start no rank: EX_CONFIG of sysexits.h."

NO_RANK = (
    "start.sh ended with exit code 0 before any rank began: does a line of `setup:` replace the shell (exec)?"
)

_CHILD_FAILED = re.compile(r"CalledProcessError: .* (returned non-zero exit status \d+|died with .+)\.$")
"The message of Python's subprocess module about a program that the rank ran."

DISK_FULL = "No space left on device"

STOP_CLASS: dict[str, tuple[FailureClass, str]] = {
    "cancelled": ("cancelled", "cancelled by the user"),
    "preempted": ("preempted", "asked to leave the machine (SIGTERM or SIGHUP)"),
    "time-limit": ("time-limit", "the time limit of the submission was reached"),
    "node-failed": ("node-failed", "the scheduler ended the job because one of its nodes failed"),
}
"Why a supervisor is asked to stop -> the failure class, in words."


@dataclass(frozen=True)
class Evidence:
    """All that is known about an attempt that has ended."""

    ranks: int
    exit_codes: dict[int, int] = field(default_factory=dict)
    """Exit code of start.sh by node: torchrun's, or on one host that of `local_ranks`, which is the code of
    the first worker that failed. Negative if a signal ended that process itself. The first entries are nodes
    that failed before launcher ended the other nodes' ranks."""
    errors: tuple[dict[str, Any], ...] = ()
    "errors/rank-*.json"
    exits: tuple[dict[str, Any], ...] = ()
    "exits/rank-*.json"
    stop_reason: str | None = None
    "Why the supervisor was asked to stop. A key of STOP_CLASS."
    lost_nodes: tuple[int, ...] = ()
    started: Mapping[int, int] = field(default_factory=dict)
    "Node of each rank that has a log file."
    disk_full: bool = False
    "Whether less than 1 MiB is free on the run directory's file system."
    host_oom_kills: Mapping[int, int] = field(default_factory=dict)
    "Processes that the kernel's OOM killer ended on each node during the attempt."
    torchrun_lines: tuple[str, ...] = ()
    "The last lines of torchrun's log on node 0, shown to the user."
    torchrun_clues: Mapping[int, Sequence[Clue]] = field(default_factory=dict)
    "Clues in the output of each node's torchrun and of the script that starts it."
    stalled: float | None = None
    "Seconds without output of any rank, after which the supervisor ended the attempt."
    output: Mapping[int, Sequence[Clue]] = field(default_factory=dict)
    "Clues in the logs of ranks without a record of their end, because their worker was killed too."
    scheduler: Clue | None = None
    "What the scheduler reports about the job's end, if that implies a failure class."
    gpus: bool = True
    "Whether the ranks compute on GPUs. On a CPU, a `gpu-oom` means that the memory budget is exceeded."


def read_records(attempt: AttemptDir, folder: str) -> tuple[dict[str, Any], ...]:
    """Return every rank's `errors` or `exits` record, sorted by time. Malformed files are left out."""
    form = {"errors": ERROR, "exits": EXIT}[folder]
    files = (attempt.path / folder).glob("rank-*.json")
    records = [record for file in files if (record := read_record(file, form)) and _belongs_to(file, record)]
    return tuple(sorted(records, key=lambda record: (record.get("time", 0.0), record["rank"])))


def _belongs_to(file: Path, record: Mapping[str, Any]) -> bool:
    return file.stem == f"rank-{record['rank']:03d}"


def started_ranks(attempt: AttemptDir) -> dict[int, int]:
    """Return the node of each rank that has a log file. A worker makes the file before it starts its rank."""
    files = attempt.logs.glob("node-*/rank-*.out")
    return {int(file.stem.partition("-")[2]): int(file.parent.name.partition("-")[2]) for file in files}


def judge(evidence: Evidence) -> Verdict:
    """Return the verdict of an attempt, with the first failing rank and the confidence."""
    evidence = _with_orders_compared(evidence)
    codes = [record["exit_code"] for record in evidence.exits]
    all_ranks_reported = len(codes) == evidence.ranks
    were_told_to_end = any(record.get("stopping") for record in evidence.exits)
    codes_of_nodes = evidence.exit_codes.values()
    if evidence.exit_codes and not any(codes_of_nodes) and not any(codes) and not were_told_to_end:
        if not (codes or evidence.started or evidence.disk_full):
            return Verdict(failure="image-error", reason=NO_RANK, confidence="likely")
        return Verdict(failure="succeeded", reason="every rank ended with exit code 0", exit_code=0)
    if evidence.stop_reason is not None:
        return _stopped(evidence, set(codes) if all_ranks_reported else set())
    if evidence.lost_nodes:
        nodes = ", ".join(map(str, evidence.lost_nodes))
        failure: FailureClass = "disk-full" if evidence.disk_full else "node-failed"
        why = f"{DISK_FULL}, and " if evidence.disk_full else ""
        return Verdict(
            failure=failure, reason=f"{why}node {nodes} stopped sending heartbeats",
            node=evidence.lost_nodes[0], confidence="likely",
        )  # fmt: skip
    verdict = (
        _from_errors(evidence) or _from_output(evidence) or _stalled(evidence) or _without_records(evidence)
    )
    if evidence.started or EXIT_NOT_STARTED not in evidence.exit_codes.values():
        return _with_slow_data(evidence, verdict)
    message = start_script_message(evidence.torchrun_lines)
    return verdict.model_copy(update={"reason": message}) if message else verdict


def _with_slow_data(evidence: Evidence, verdict: Verdict) -> Verdict:
    """Return the verdict. For a time-out, add which ranks were fetching samples while the others waited."""
    slow = [str(record["rank"]) for record in evidence.exits if _was_fetching(record)]
    if verdict.failure != "nccl-timeout" or not slow:
        return verdict
    what = f"rank {', '.join(slow)} was still fetching samples"
    reason = f"{verdict.reason}; {what}: make that faster, or raise train.collective_timeout"
    return verdict.model_copy(update={"reason": reason})


def _was_fetching(record: Mapping[str, Any]) -> bool:
    lines = map(str, reversed(record.get("last_lines", ())))
    return STILL_FETCHING in next((line for line in lines if STILL_FETCHING in line or FETCHED in line), "")


def start_script_message(lines: Sequence[str]) -> str:
    """Return why start.sh started no rank, such as a failed line of `setup:`, or "" if it does not say."""
    messages = (line for line in reversed(lines) if line.startswith("launcher: "))
    return next(messages, "").removeprefix("launcher: ")


def judge_abandoned(evidence: Evidence, reason: str, record: str) -> Verdict:
    """Return the verdict of an attempt whose supervisor ended with the job.

    `reason` is what the scheduler reports, and `record` is its source. The cause is the one that explains the
    others among that report, the ranks' records and their output.
    """
    evidence = _with_orders_compared(evidence)
    candidates = [*_candidates(evidence), *_candidates_of_errors(evidence)]
    for rank, clues in evidence.output.items():
        where = (f"the log of rank {rank}",)
        node = evidence.started.get(rank)
        candidates += [Candidate(_as_printed(clue), rank, node, evidence=where) for clue in clues]
    if evidence.scheduler is not None:
        candidates.append(Candidate(evidence.scheduler, reason=reason, evidence=(record,)))
    cause = cause_of(candidates)
    if cause is None or cause.confidence == "guess":
        lines = evidence.torchrun_lines
        text = f"{reason}, and its output holds no known error"
        return Verdict(
            failure="unknown", reason=text, last_lines=lines, evidence=(record,), seen=_seen(cause),
            confidence="guess",
        )  # fmt: skip
    verdict = _verdict(evidence, cause)
    if record in verdict.evidence:
        return verdict
    return verdict.model_copy(update={"evidence": (*verdict.evidence, record)})


def _with_orders_compared(evidence: Evidence) -> Evidence:
    """Return the evidence, changed to `desync` in the ranks' errors if they issued different collectives.

    This explains time-outs and other errors of these ranks.
    """
    compared = [error for error in evidence.errors if error.get("collectives")]
    begun = {error["collectives"]["begun"] for error in compared}
    if len(begun) != 1:
        return evidence  # ranks in different steps cannot be compared
    orders = {int(error["rank"]): error["collectives"]["issued"] for error in compared}
    problem = problem_of(compared[0]["collectives"]["units"], orders, ended=False)
    if problem is None:
        return evidence
    changes = {"failure": "desync", "exception": problem}
    return replace(evidence, errors=tuple({**error, **changes} for error in compared))


def _candidates_of_errors(evidence: Evidence) -> Iterator[Candidate]:
    """Yield the failures that ranks of the built-in entrypoint recorded."""
    for error in evidence.errors:
        kind, rank = KIND_OF.get(str(error.get("failure"))), int(error["rank"])
        if kind is None or (failure := CLASS_OF_KIND[kind]) in _CONSEQUENCE_CLASSES:
            continue
        text, time = str(error.get("exception") or failure), float(error.get("time", 0.0))
        clue = Clue(kind, text, time=time, strength="record")
        memory = _memory_of(error, failure)
        reason = _reason(failure, rank, error.get("phase"), error.get("step"), memory, evidence.gpus, text)
        yield Candidate(clue, rank, error.get("node"), reason, (f"errors/rank-{rank:03d}.json",))


def _stalled(evidence: Evidence) -> Verdict | None:
    """Return the verdict if the ranks stalled. Used if nothing in the output explains why."""
    if evidence.stalled is None:
        return None
    reason = f"the ranks were ended: none printed anything for {evidence.stalled:.0f} s (stall_timeout)"
    lines = next((tuple(record.get("last_lines", ())) for record in evidence.exits), ())
    return Verdict(failure="unknown", reason=reason, last_lines=lines, confidence="guess")


def _stopped(evidence: Evidence, codes: set[int]) -> Verdict:
    """Return the verdict of a run that was asked to stop. `codes`: the ranks' exit codes, if all reported."""
    failure, why = STOP_CLASS[evidence.stop_reason or "cancelled"]
    clean = codes == {EXIT_STOPPED}
    if clean:
        how = "a checkpoint was written"
    elif codes == {EXIT_FOLLOWED}:
        how = "the current step was given up because no time was left"
    else:
        failure_of_own = _failed_while_stopping(evidence)
        reasons = [failure_of_own.reason] if failure_of_own is not None else []
        if any(map(killed_while_stopping, evidence.exits)):
            reasons.append("ranks that did not end in time were killed")
        how = "; ".join(reasons) or "the ranks were ended"
        if failure_of_own is not None:
            stopped = {"failure": failure, "reason": f"{why}; {how}", "exit_code": None}
            return failure_of_own.model_copy(update={**stopped, "confidence": "certain"})
    return Verdict(failure=failure, reason=f"{why}; {how}", exit_code=EXIT_STOPPED if clean else None)


def _failed_while_stopping(evidence: Evidence) -> Verdict | None:
    """Return why a rank failed by itself in an attempt that was asked to stop, or None if none did."""
    expected = {EXIT_STOPPED, EXIT_FOLLOWED, *_ENDED_AS_ASKED}
    failed = [record for record in _failed_exits(evidence) if record["exit_code"] not in expected]
    by_themselves = [record for record in failed if not killed_while_stopping(record)]
    if not by_themselves and not evidence.errors:
        return None
    verdict = _from_errors(evidence) or _from_output(evidence)
    if verdict is not None and verdict.failure != "unknown":
        return None if verdict.failure in _CONSEQUENCE_CLASSES else verdict
    return _unexplained(by_themselves[0]) if by_themselves else None


def _from_errors(evidence: Evidence) -> Verdict | None:
    """Return the verdict from the records of ranks of the built-in entrypoint.

    The record that explains the others decides, otherwise the earliest. A consequence decides only if there
    is nothing else.
    """
    roots = [error for error in evidence.errors if error.get("failure") not in _CONSEQUENCE_CLASSES]
    if not roots and (_silent_ranks(evidence) or _ended_first(evidence) is not None):
        return None  # another rank died without a record, and these ranks only noticed it
    for error in sorted(roots, key=_order_of_error) or evidence.errors:
        rank = int(error["rank"])
        exit_record = _exit_of(evidence, rank)
        exception = str(error.get("exception") or "")
        # A full disk is still full in the next attempt, so the user must act.
        failure: FailureClass = error.get("failure") or ("disk-full" if DISK_FULL in exception else "unknown")
        memory = _memory_of(error, failure)
        return Verdict(
            failure=failure,
            reason=_reason(
                failure, rank, error.get("phase"), error.get("step"), memory, evidence.gpus, exception
            ),
            phase=error.get("phase"),
            rank=rank,
            node=error.get("node"),
            step=error.get("step"),
            exit_code=exit_record.get("exit_code"),
            exception=exception or None,
            last_lines=tuple(exit_record.get("last_lines", ())),
            evidence=(f"errors/rank-{rank:03d}.json",),
            seen=_seen(cause_of(_candidates(evidence), failure, rank)),
            confidence="certain" if error in roots else "likely",
            memory=memory,
            why_not_in_process=error.get("why_not_in_process"),
        )
    return None


def _order_of_error(error: Mapping[str, Any]) -> int:
    kind = KIND_OF.get(str(error.get("failure")))
    return order_of(kind) if kind is not None else order_of("consequence")


def _memory_of(error: Mapping[str, Any], failure: FailureClass) -> OutOfMemory | None:
    """Return the OOM that the rank recorded, or the one in its exception's message."""
    if failure not in CLASS_OF.values():
        return None
    try:
        return OutOfMemory.model_validate(error.get("memory"))
    except ValidationError:  # not recorded by launcher.train, an older file or a damaged one
        return out_of_memory(str(error.get("exception") or ""))


def _reason(
    failure: FailureClass,
    rank: int | None,
    phase: str | None = None,
    step: int | None = None,
    memory: OutOfMemory | None = None,
    gpus: bool = True,
    text: str = "",
    printed: bool = False,
) -> str:
    """Return the reason as a sentence.

    `text`: the decisive line or exception. `printed`: it is a line, and no exception.
    """
    if memory is not None and memory.kind == "shared":
        what = "ran out of shared memory (/dev/shm)"
    elif failure == "gpu-oom" and not gpus:
        what = "ran out of memory"
    elif failure == "rendezvous-failed" and PORT_TAKEN.search(text):
        what = "could not listen at its port, which another program uses"
    elif failure == "user-error" and phase == "checkpoint":  # reading comes before the first step
        what = "could not save" if step is not None else "cannot continue from the checkpoint"
    elif failure == "user-error" and printed:
        what = "printed an error message and failed"
    elif failure == "node-failed" and FILE_SYSTEM_FAILED.search(text):
        what = "used a file system that failed"
    else:
        what = FAILURES[failure].did
    where = f" in {phase}" if phase else ""
    when = f" of step {step}" if step is not None else ""
    return f"{'the job' if rank is None else f'rank {rank}'} {what}{where}{when}"


def _exit_of(evidence: Evidence, rank: int) -> dict[str, Any]:
    return next((record for record in evidence.exits if record["rank"] == rank), {})


def _failed_exits(evidence: Evidence) -> list[dict[str, Any]]:
    """Return the records of failed ranks by time. Ranks that were told to end come last."""
    failed = [record for record in evidence.exits if record["exit_code"] != 0]
    return sorted(failed, key=lambda record: (bool(record.get("stopping")), record.get("time", 0.0)))


def _ended_first(evidence: Evidence) -> dict[str, Any] | None:
    """Return the record of the first failed rank if it ended before it recorded an error."""
    recorded = {int(error["rank"]) for error in evidence.errors}
    for record in _failed_exits(evidence)[:1]:
        if record["exit_code"] < 0 or _ended_by_itself(record):
            return record if record["rank"] not in recorded else None
    return None


def _ended_by_itself(record: Mapping[str, Any]) -> bool:
    """Return whether a rank ended by itself, not because of a signal, a request or another rank."""
    code = record["exit_code"]
    return not record.get("stopping") and code >= 0 and code not in (EXIT_STOPPED, EXIT_FOLLOWED)


def _ended_before_others(evidence: Evidence, found: Sequence[Candidate]) -> dict[str, Any] | None:
    """Return the record of the first rank that ended by itself before any rank missed another one.

    `found` holds the evidence of ranks that missed another one.
    """
    missed = [candidate for candidate in found if CLASS_OF_KIND[candidate.clue.kind] in _NETWORK]
    victims, since = (
        {candidate.rank for candidate in missed},
        min(candidate.clue.time for candidate in missed),
    )
    ended = [
        record
        for record in evidence.exits
        if _ended_by_itself(record)
        and record["rank"] not in victims
        and float(record.get("time", 0.0)) <= since + LEAVING_SECONDS
    ]
    return min(
        ended,
        key=lambda candidate: (candidate["exit_code"] == 0, float(candidate.get("time", 0.0))),
        default=None,
    )


def _silent_ranks(evidence: Evidence) -> list[int]:
    """Return the ranks that started and left no record of their end, while another rank did.

    The worker that watches a rank records its end even if the worker itself is asked to end. Only a SIGKILL
    of the worker prevents that. The list is empty if a missing record proves nothing: on a full disk, or if
    the process that starts the ranks was killed, because launcher's own SIGKILL may have come first. If no
    rank has a record, only the exit code of `local_ranks` shows that a worker was killed.
    """
    recorded = {record["rank"] for record in evidence.exits}
    if evidence.disk_full or not (recorded or _WORKER_KILLED in evidence.exit_codes.values()):
        return []
    return [
        rank
        for rank, node in sorted(evidence.started.items())
        if rank not in recorded and evidence.exit_codes.get(node, 0) > 0
    ]


def _from_output(evidence: Evidence) -> Verdict | None:
    """Return the verdict from the output, signals and OOM kills of all ranks."""
    failed, only_stopped = _failed_exits(evidence), _only_stopped(evidence)
    candidates = _candidates(evidence)
    cause = cause_of(candidates)
    if cause is None or (cause.confidence == "guess" and not failed):
        return None if only_stopped or not failed else _unexplained(failed[0])
    if cause.failure == "unknown" and not cause.candidate.reason:
        return None if only_stopped or not failed else _unexplained(failed[0], cause)
    if cause.failure in _NETWORK and (ended_rank := _ended_before_others(evidence, candidates)) is not None:
        return _missed_a_rank(evidence, cause, ended_rank)
    return _verdict(evidence, cause)


def _missed_a_rank(evidence: Evidence, cause: Cause, ended_rank: Mapping[str, Any]) -> Verdict:
    """Return the verdict if ranks missed another one, `ended_rank`, that had ended by itself."""
    if ended_rank["exit_code"] != 0:
        followed = cause._replace(others=((cause.candidate, "follows from another failure"), *cause.others))
        return _unexplained(ended_rank).model_copy(update={"seen": _seen(followed)[1:]})
    verdict = _verdict(evidence, cause)
    reason = f"{verdict.reason}: rank {ended_rank['rank']} had ended with exit code 0"
    return verdict.model_copy(update={"reason": reason})


def _candidates(evidence: Evidence) -> list[Candidate]:
    """Return what the output, the exit codes and the OOM kills of all ranks show."""
    blame = not _only_stopped(evidence)
    exits = (
        candidate
        for record in _failed_exits(evidence)
        for candidate in _candidates_of_exit(evidence, record, blame=blame)
    )
    return [*_candidates_of_silence(evidence), *_candidates_of_torchrun(evidence), *exits]


def _only_stopped(evidence: Evidence) -> bool:
    """Return whether every rank ended because its parent was gone or the supervisor ended the attempt."""
    starter_killed = any(code < 0 for code in evidence.exit_codes.values())
    stopped = all(record.get("stopping") for record in _failed_exits(evidence))
    return evidence.stalled is not None or (starter_killed and stopped)


def _verdict(evidence: Evidence, cause: Cause) -> Verdict:
    clue, rank, node, own_reason, where = cause.candidate
    record = _exit_of(evidence, rank) if rank is not None else {}
    memory = None
    if clue.kind in MEMORY_OF and not own_reason:
        memory = OutOfMemory(kind=MEMORY_OF[clue.kind], **sizes(clue.memory_text))
    named = clue.kind == "exception" or NAMED.match(clue.text) is not None
    ended_by = -int(record.get("exit_code") or 0)
    reason = own_reason or _reason(
        cause.failure, rank, memory=memory, gpus=evidence.gpus, text=clue.text, printed=not named
    )
    if clue.own and not own_reason:
        who = "the job" if rank is None else f"rank {rank}"
        reason = f"{who} printed `{clue.text[:200]}`, which is {cause.failure} by `failures:`"
    if ended_by > 0 and not own_reason and clue.kind == "exception":
        reason += f" and was then ended by {signal_name(ended_by)}"
    return Verdict(
        failure=cause.failure,
        reason=reason,
        rank=rank,
        node=node,
        exit_code=record.get("exit_code", evidence.exit_codes.get(node or 0) if rank is None else None),
        exception=clue.text if named else None,
        last_lines=tuple(record.get("last_lines", ())) or evidence.torchrun_lines,
        evidence=where,
        seen=_seen(cause),
        confidence=cause.confidence,
        memory=memory,
    )


MAX_SEEN = 8


def _seen(cause: Cause | None) -> tuple[Seen, ...]:
    """Return the decisive line and the most informative others. Equal lines of several ranks count once."""
    if cause is None:
        return ()
    pairs = [(cause.candidate, ""), *cause.others]
    lines: dict[tuple[str, str], Seen] = {}
    for (clue, rank, node, *_), why in pairs:
        if why and not clue.line:
            continue  # an exit code, which the decisive line explains
        key = (clue.kind, why) if why else ("", "")
        lines.setdefault(
            key,
            Seen(
                failure=CLASS_OF_KIND[clue.kind],
                text=clue.text,
                place=_place(clue, rank, node),
                why=why,
                before=clue.before if not why else (),
            ),
        )
    return tuple(lines.values())[:MAX_SEEN]


def _place(clue: Clue, rank: int | None, node: int | None) -> str:
    if not clue.line:
        return ""
    if rank is None:
        return f"node-{node or 0:02d}/torchrun.err:{clue.line}"
    return f"rank-{rank:03d}.{clue.stream or 'err'}:{clue.line}"


def _unexplained(record: Mapping[str, Any], cause: Cause | None = None) -> Verdict:
    """Return the verdict if no output explains the end: only the exit code is known."""
    rank, code = int(record["rank"]), int(record["exit_code"])
    how = f"was ended by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    exception = cause.candidate.clue.text if cause is not None and cause.candidate.clue.uncaught else None
    if child := _CHILD_FAILED.search(exception or ""):
        how += f" because a program that it ran {child[1]}"
    return Verdict(
        failure="unknown",
        reason=f"rank {rank} {how}, and its output holds no known error",
        rank=rank,
        node=record.get("node"),
        exit_code=code,
        exception=exception,
        last_lines=tuple(record.get("last_lines", ())),
        evidence=(f"exits/rank-{rank:03d}.json",),
        seen=_seen(cause),
        confidence="guess",
    )


def _candidates_of_exit(evidence: Evidence, record: Mapping[str, Any], *, blame: bool) -> Iterator[Candidate]:
    """Yield what one rank printed and how it ended. `blame`: it did not end because its parent was gone."""
    rank, node, code = int(record["rank"]), record.get("node"), int(record["exit_code"])
    if code == EXIT_FOLLOWED:
        return
    where, time = (f"exits/rank-{rank:03d}.json",), float(record.get("time", 0.0))
    clues = [clue for record_ in record.get("clues") or () if (clue := clue_of(record_)) is not None]
    exception = str(record.get("exception") or "")
    copies = [clue for clue in clues if exception and _prints(clue, exception)]
    crash = next((clue for clue in clues if code < 0 and clue.text.startswith(_CRASHED)), None)
    for clue in clues:
        if clue not in copies and clue is not crash:
            yield Candidate(_as_printed(clue), rank, node, evidence=where)
    if exception:
        clue = clue_of_exception(exception)._replace(time=min([time, *(record_.time for record_ in clues)]))
        for copy in copies[:1]:
            clue = clue._replace(stream=copy.stream, line=copy.line, before=copy.before)
        yield Candidate(clue, rank, node, evidence=(*where, "its torchelastic error file"))
    if not blame or (record.get("stopping") and evidence.ranks > 1):
        return
    explained = any(clue.kind != "consequence" and clue.strength != "weak" for clue in clues)
    # If the kernel killed a child of the program, such as a pool's process, any exit code may follow.
    if code in _KILLED or (clues and not explained and evidence.host_oom_kills.get(node or 0)):
        kill = _kill(evidence, node, f"rank {rank}", time, code)
        yield kill._replace(rank=rank, node=node, evidence=(*where, *kill.evidence))
    elif code < 0 and not (code in _CRASHES and any(clue.kind != "consequence" for clue in clues)):
        killed = Clue("killed", f"exit code {code}", time=time)
        reason = f"rank {rank} was ended by {signal_name(-code)}"
        yield Candidate(_crashed(killed, crash), rank, node, reason, where)
    elif code in (126, 127):
        said = (clue for clue in reversed(clues) if clue.kind == "user-error" and not clue.survived)
        clue = next(said, Clue("user-error", f"exit code {code}"))._replace(time=time, strength="record")
        yield Candidate(clue, rank, node, f"rank {rank} could not start its command", where)


def _crashed(killed: Clue, crash: Clue | None) -> Clue:
    """Return the clue of a signal. If it was a crash, add what faulthandler printed, and frames: those of
    installed packages only if there are no others."""
    if crash is None:
        return killed
    frames = [line for line in reversed(crash.after) if _FRAME.match(line)]
    own = [line for line in frames if "-packages/" not in line]
    return killed._replace(text=crash.text, stream=crash.stream, line=crash.line, before=tuple(own or frames))


def _prints(clue: Clue, exception: str) -> bool:
    """Return whether a line of output shows the recorded exception. Python prints the module of its type."""
    first = shortened(exception.partition("\n")[0])
    return bool(first) and clue.text.endswith(first)


def _as_printed(clue: Clue) -> Clue:
    """Lower a scheduler's clue to the strength `words`, because any program can print such a line."""
    return clue._replace(strength="words") if clue.strength == "record" else clue


def _candidates_of_silence(evidence: Evidence) -> Iterator[Candidate]:
    """Yield the first silent rank. It was killed with its worker; no failure of another rank causes this."""
    for rank in _silent_ranks(evidence)[:1]:
        node = evidence.started[rank]
        kill = _kill(evidence, node, f"rank {rank}, with the worker that watches it,", 0.0)
        where = (f"no exits/rank-{rank:03d}.json", *kill.evidence)
        yield kill._replace(rank=rank, node=node, evidence=where)


def _candidates_of_torchrun(evidence: Evidence) -> Iterator[Candidate]:
    for node, clues in evidence.torchrun_clues.items():
        for clue in clues:
            yield Candidate(clue, None, node, evidence=(f"logs/node-{node:02d}/torchrun.err",))


def _kill(
    evidence: Evidence, node: int | None, who: str, time: float, code: int = -signal.SIGKILL
) -> Candidate:
    """Explain a SIGKILL. The kernel sent it if it counted an OOM kill or the ranks used nearly all memory.

    `code`: exit code of the process. A positive one is of a process that ended itself, such as a shell that
    ran the killed program.
    """
    kills = evidence.host_oom_kills.get(node, 0) if node is not None else 0
    if kills:
        clue = Clue("host-memory", f"oom_kill +{kills}", time=time)
        reason = f"{who} was ended by the kernel because host memory ran out"
        return Candidate(clue, reason=reason, evidence=(f"oom_kill +{kills}",))
    used, limit = _resident(evidence, node)
    # A sum above the limit proves nothing: pages that ranks share are counted twice.
    if limit and NEAR_LIMIT * limit <= used <= limit:
        numbers = f"its node's ranks had {format_bytes(used)} of {format_bytes(limit)} host memory"
        clue = Clue("host-memory", numbers, time=time)
        how = "was killed (SIGKILL)" if code < 0 else f"ended with exit code {code}"
        return Candidate(clue, reason=f"{who} {how} when {numbers}", evidence=(numbers,))
    clue = Clue("killed", "SIGKILL", time=time)
    if code < 0:
        return Candidate(clue, reason=f"{who} was killed (SIGKILL), but not by launcher")
    what = "a program that it ran was killed (SIGKILL), or it chose this code itself"
    return Candidate(clue, reason=f"{who} ended with exit code {code}: {what}")


NEAR_LIMIT = 0.9
"Share of a node's memory at the peak above which a SIGKILL is attributed to the kernel."


def _resident(evidence: Evidence, node: int | None) -> tuple[int, int]:
    """Return the sum of the peak resident memory of a node's ranks, and its limit. In bytes; 0 if unknown."""
    records = [record for record in evidence.exits if record.get("node") == node]
    limits = [int(record["memory_limit"]) for record in records if record.get("memory_limit")]
    return sum(int(record.get("max_rss") or 0) for record in records), min(limits, default=0)


def _without_records(evidence: Evidence) -> Verdict:
    """Return the verdict if no rank left a record: none started, or what starts them was killed."""
    node, code = next(((n, c) for n, c in evidence.exit_codes.items() if c != 0), (0, 0))
    lines = evidence.torchrun_lines
    common: dict[str, Any] = {
        "node": node,
        "exit_code": code,
        "last_lines": lines,
        "evidence": (f"logs/node-{node:02d}/torchrun.err",),
        "confidence": "guess",
    }
    if code < 0:
        who = f"the process that starts the ranks on node {node}"
        return Verdict(failure="unknown", reason=f"{who} was ended by {signal_name(-code)}", **common)
    if evidence.disk_full:
        reason = f"{DISK_FULL}: the ranks could not record why they ended"
        return Verdict(failure="disk-full", reason=reason, **common)
    if code > 128 and evidence.started:
        reason = f"the worker that watches a rank was ended by {signal_name(code - 128)}"
        return Verdict(failure="unknown", reason=reason, **common)
    if code == 0 or evidence.started:
        return Verdict(failure="unknown", reason="the ranks ended without leaving a record", **common)
    common["confidence"] = "likely"
    return Verdict(failure="user-error", reason="the ranks could not be started", **common)


def killed_while_stopping(record: Mapping[str, Any]) -> bool:
    """Return whether the rank of an `exits` record was asked to end and was killed because it did not.

    Records of older versions do not say who killed a rank.
    """
    return bool(record.get("stopping")) and record.get("killed", True) and record["exit_code"] in _KILLED


def stopped_without_ranks(reason: str, *, before_first: bool) -> Verdict:
    """Return the verdict of a run that was asked to stop while no rank was running.

    `before_first`: whether it was before the first attempt.
    """
    failure, why = STOP_CLASS[reason]
    when = "before it started" if before_first else "between two attempts"
    return Verdict(failure=failure, reason=f"{why}, {when}")

"""How did the attempt end? From files first, exit codes and log patterns last."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from launcher.logs.out_of_memory import CLASS_OF, out_of_memory
from launcher.runs.files import read_json
from launcher.runs.layout import AttemptDir
from launcher.spec.verdict import (
    EXIT_FOLLOWED,
    EXIT_STOPPED,
    Confidence,
    FailureClass,
    OutOfMemory,
    Verdict,
)
from launcher.supervise.patterns import Found, class_of_end, class_of_exception, class_of_text, exception_of

# A rank that met one of these was hurt by another rank, unless no other cause is known.
_CONSEQUENCES: frozenset[FailureClass | None] = frozenset({None, "nccl-timeout", "rendezvous-failed"})

DISK_FULL = "No space left on device"

_STOP_CLASS: dict[str, tuple[FailureClass, str]] = {
    "cancelled": ("cancelled", "cancelled by the user"),
    "preempted": ("preempted", "asked to leave the machine (SIGTERM or SIGHUP)"),
    "time-limit": ("time-limit", "the time limit of the submission was reached"),
}


@dataclass(frozen=True)
class Evidence:
    """All that is known about an attempt that has ended."""

    ranks: int
    exit_codes: dict[int, int] = field(default_factory=dict)
    "torchrun's exit code per node, or that of the only rank's worker; negative for a signal."
    errors: tuple[dict[str, Any], ...] = ()
    "errors/rank-*.json"
    exits: tuple[dict[str, Any], ...] = ()
    "exits/rank-*.json"
    stop_reason: str | None = None
    "Why the supervisor was asked to stop: a key of _STOP_CLASS."
    lost_nodes: tuple[int, ...] = ()
    started: Mapping[int, int] = field(default_factory=dict)
    "Ranks that have a log file, each with its node."
    disk_full: bool = False
    "The run directory's file system has less than a MiB left."
    host_oom_kills: Mapping[int, int] = field(default_factory=dict)
    "Processes that the kernel's OOM killer ended on each node meanwhile."
    torchrun_lines: tuple[str, ...] = ()
    gpus: bool = True
    "The ranks compute on GPUs: on a CPU, what runs out as if it were a GPU's memory is a budget."

    @property
    def alone(self) -> bool:
        """A job's only rank runs without torchrun: the exit code of its node is its own."""
        return self.ranks == 1


def read_records(attempt: AttemptDir, folder: str) -> tuple[dict[str, Any], ...]:
    """Every rank's `errors` or `exits` file, by time."""
    files = sorted((attempt.path / folder).glob("rank-*.json"))
    records = [record for file in files if isinstance(record := read_json(file), dict)]
    return tuple(sorted(records, key=lambda record: float(record.get("time", 0))))


def started_ranks(attempt: AttemptDir) -> dict[int, int]:
    """Ranks that have a log file, each with its node. A worker makes one before it starts its rank."""
    files = attempt.logs.glob("node-*/rank-*.out")
    return {int(file.stem.partition("-")[2]): int(file.parent.name.partition("-")[2]) for file in files}


def judge(evidence: Evidence) -> Verdict:
    """The Verdict, with the first failing rank and how sure it is."""
    codes = [record["exit_code"] for record in evidence.exits]
    all_ranks_reported = len(codes) == evidence.ranks
    if all(code == 0 for code in evidence.exit_codes.values()) and evidence.exit_codes and not any(codes):
        return Verdict(failure="succeeded", reason="every rank ended with exit code 0", exit_code=0)
    if evidence.stop_reason is not None:
        return _stopped(evidence, clean=all_ranks_reported and set(codes) == {EXIT_STOPPED})
    if evidence.lost_nodes:
        nodes = ", ".join(map(str, evidence.lost_nodes))
        return Verdict(
            failure="node-failed", reason=f"node {nodes} gave no sign of life",
            node=evidence.lost_nodes[0], confidence="likely",
        )  # fmt: skip
    return (
        _from_errors(evidence) or _from_silence(evidence) or _from_exits(evidence) or _from_torchrun(evidence)
    )


def _stopped(evidence: Evidence, clean: bool) -> Verdict:
    failure, why = _STOP_CLASS[evidence.stop_reason or "cancelled"]
    if clean:
        how = "a checkpoint was written"
    elif any(error.get("phase") == "checkpoint" for error in evidence.errors):
        how = "no checkpoint could be written, the one before stays"
    else:
        how = "the ranks were ended"
    return Verdict(failure=failure, reason=f"{why}; {how}", exit_code=EXIT_STOPPED if clean else None)


def _from_errors(evidence: Evidence) -> Verdict | None:
    """A rank said why. The first root cause in time; a consequence only if there is nothing else."""
    roots = [e for e in evidence.errors if e.get("failure") not in _CONSEQUENCES]
    if not roots and (_silent(evidence) or _killed_first(evidence) is not None):
        return None  # somebody died without a word, and the others noticed
    for error in roots or evidence.errors:
        rank = int(error["rank"])
        exit_record = _exit_of(evidence, rank)
        exception = str(error.get("exception") or "")
        # A full disk will not be less full at the next attempt: the user must act.
        failure: FailureClass = error.get("failure") or (
            "user-error" if DISK_FULL in exception else "unknown"
        )
        memory = _memory_of(error, failure)
        return Verdict(
            failure=failure,
            reason=_reason(
                failure, rank, error.get("phase"), error.get("step"), exception, memory, evidence.gpus
            ),
            phase=error.get("phase"),
            rank=rank,
            node=error.get("node"),
            step=error.get("step"),
            exit_code=exit_record.get("exit_code"),
            exception=exception or None,
            last_lines=tuple(exit_record.get("last_lines", ())),
            evidence=(f"errors/rank-{rank:03d}.json",),
            confidence="certain" if error in roots else "likely",
            memory=memory,
            why_not_in_process=error.get("why_not_in_process"),
        )
    return None


def _memory_of(error: Mapping[str, Any], failure: FailureClass) -> OutOfMemory | None:
    """What the rank has written of it, else what its exception says."""
    if failure not in CLASS_OF.values():
        return None
    try:
        return OutOfMemory.model_validate(error.get("memory"))
    except ValidationError:  # no memory of launcher.train: an older file, or a damaged one
        return out_of_memory(str(error.get("exception") or ""))


def _reason(
    failure: FailureClass,
    rank: int,
    phase: str | None,
    step: int | None,
    text: str,
    memory: OutOfMemory | None = None,
    gpus: bool = True,
) -> str:
    shared = memory is not None and memory.kind == "shared"
    what = (
        "ran out of shared memory (/dev/shm)"
        if shared
        else "found the disk full"
        if DISK_FULL in text
        else {
            "gpu-oom": "ran out of GPU memory" if gpus else "ran out of memory",
            "host-oom": "ran out of host memory",
            "nccl-timeout": "waited in vain for the other ranks",
            "rendezvous-failed": "could not meet the other ranks",
            "user-error": _user_error(phase, step),
        }.get(failure, "failed")
    )
    where = f" in {phase}" if phase else ""
    when = f" of step {step}" if step is not None else ""
    return f"rank {rank} {what}{where}{when}"


def _user_error(phase: str | None, step: int | None) -> str:
    if phase == "checkpoint":  # it is read before the first step
        return "could not save" if step is not None else "cannot go on from what is there"
    return "raised an exception"


def _exit_of(evidence: Evidence, rank: int) -> dict[str, Any]:
    return next((record for record in evidence.exits if record["rank"] == rank), {})


def _failed_exits(evidence: Evidence) -> list[dict[str, Any]]:
    """Ranks that failed, by time, but first those that nobody else had hurt."""
    failed = [record for record in evidence.exits if record["exit_code"] != 0]
    return sorted(failed, key=lambda record: (bool(record.get("stopping")), _is_consequence(record)))


def _is_consequence(record: dict[str, Any]) -> bool:
    """A peer that vanished shows as a closed connection, sometimes before the vanished rank is recorded."""
    if record["exit_code"] < 0:
        return False
    if record["exit_code"] == EXIT_FOLLOWED:
        return True
    found = _found(record)
    return found is not None and found.failure in _CONSEQUENCES


def _found(record: Mapping[str, Any]) -> Found | None:
    """The class by the rank's torchelastic error file where it wrote one, else by its last lines."""
    if told := record.get("exception"):
        return class_of_exception(str(told))
    return class_of_end(record.get("last_lines", ()))


def _killed_first(evidence: Evidence) -> dict[str, Any] | None:
    """The first failing rank if a signal ended it and it left no word."""
    said = {int(error["rank"]) for error in evidence.errors}
    for record in _failed_exits(evidence)[:1]:
        if record["exit_code"] < 0 and record["rank"] not in said:
            return record
    return None


def _silent(evidence: Evidence) -> list[int]:
    """Ranks that started and left no record of their end, while another one did.

    The worker that watches a rank records its end even when it is asked to end itself: only a SIGKILL takes
    it so fast. Where torchrun was killed, ours may come first, and on a full disk nothing can be recorded.
    """
    recorded = {record["rank"] for record in evidence.exits}
    if evidence.disk_full or (not recorded and evidence.ranks > 1):
        return []
    return [
        rank
        for rank, node in sorted(evidence.started.items())
        if rank not in recorded and _killed_silently(evidence, evidence.exit_codes.get(node, 0))
    ]


def _killed_silently(evidence: Evidence, code: int) -> bool:
    return code == -signal.SIGKILL if evidence.alone else code > 0


def _from_silence(evidence: Evidence) -> Verdict | None:
    """Nobody knows when a silent rank ended, but nothing that happens to another one makes it silent."""
    for rank in _silent(evidence)[:1]:
        failure, reason, confidence, extra = _class_of_kill(
            evidence, evidence.started[rank], f"rank {rank}, with the worker that watches it,"
        )
        return Verdict(
            failure=failure,
            reason=reason,
            rank=rank,
            node=evidence.started[rank],
            evidence=(f"no exits/rank-{rank:03d}.json", *extra),
            confidence=confidence,
        )
    return None


def _from_exits(evidence: Evidence) -> Verdict | None:
    torchrun_killed = any(code < 0 for code in evidence.exit_codes.values())
    if (
        not evidence.alone
        and torchrun_killed
        and all(record.get("stopping") for record in _failed_exits(evidence))
    ):
        return None  # the ranks ended because torchrun was gone
    for record in _failed_exits(evidence)[:1]:
        return _verdict_of_exit(evidence, record)
    return None


def _verdict_of_exit(evidence: Evidence, record: Mapping[str, Any]) -> Verdict:
    rank, code = int(record["rank"]), int(record["exit_code"])
    lines = tuple(record.get("last_lines", ()))
    failure, reason, confidence, extra = _class_of_exit(evidence, record)
    found = _found(record) if failure in CLASS_OF.values() else None
    return Verdict(
        failure=failure,
        reason=reason,
        rank=rank,
        node=record.get("node"),
        exit_code=code,
        exception=record.get("exception") or exception_of(lines),
        last_lines=lines,
        evidence=(f"exits/rank-{rank:03d}.json", *extra),
        confidence=confidence,
        memory=found.memory if found is not None else None,
    )


def _class_of_exit(
    evidence: Evidence, record: Mapping[str, Any]
) -> tuple[FailureClass, str, Confidence, tuple[str, ...]]:
    rank, code = int(record["rank"]), int(record["exit_code"])
    if code == -signal.SIGKILL:
        return _class_of_kill(evidence, record.get("node"), f"rank {rank}")
    if found := _found(record):
        reason = _reason(found.failure, rank, None, None, found.text, found.memory, evidence.gpus)
        if record.get("exception"):
            return found.failure, reason, "certain", ("its torchelastic error file",)
        line = found.text.partition("\n")[0]
        return found.failure, reason, "likely", (f"log: {line[:200]}",)
    if code < 0:
        return "unknown", f"rank {rank} was ended by {_signal_name(-code)}", "likely", ()
    if record.get("exception") or exception_of(record.get("last_lines", ())):
        return "user-error", f"rank {rank} raised an exception", "certain", ()
    if code in (126, 127):
        return "user-error", f"rank {rank} could not start its command", "certain", ()
    return "user-error", f"rank {rank} ended with exit code {code}", "likely", ()


def _class_of_kill(
    evidence: Evidence, node: int | None, who: str
) -> tuple[FailureClass, str, Confidence, tuple[str, ...]]:
    kills = evidence.host_oom_kills.get(node, 0) if node is not None else 0
    if kills:
        reason = f"{who} was ended by the kernel because host memory ran out"
        return "host-oom", reason, "likely", (f"oom_kill +{kills}",)
    return "unknown", f"{who} was killed (SIGKILL) by somebody outside the run", "likely", ()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _from_torchrun(evidence: Evidence) -> Verdict:
    """No rank left a record: the ranks never started, or torchrun itself was killed."""
    node, code = next(((n, c) for n, c in evidence.exit_codes.items() if c != 0), (0, 0))
    lines = evidence.torchrun_lines
    common: dict[str, Any] = {
        "node": node,
        "exit_code": code,
        "last_lines": lines,
        "evidence": (f"logs/node-{node:02d}/torchrun.err",),
    }
    by_text = class_of_text(lines)
    if by_text is not None and by_text.failure == "rendezvous-failed":
        return Verdict(
            failure="rendezvous-failed", reason="the nodes could not meet", confidence="likely", **common
        )
    if code < 0:
        who = "the worker of the only rank" if evidence.alone else f"torchrun on node {node}"
        reason = f"{who} was ended by {_signal_name(-code)}"
        return Verdict(failure="unknown", reason=reason, confidence="likely", **common)
    if evidence.disk_full:
        reason = f"{DISK_FULL}: the ranks could not say why they ended"
        return Verdict(failure="user-error", reason=reason, confidence="likely", **common)
    if code == 0 or evidence.started:
        reason = "the ranks ended without a word"
        return Verdict(failure="unknown", reason=reason, confidence="likely", **common)
    reason, exception = "the ranks could not be started", exception_of(lines)
    return Verdict(failure="user-error", reason=reason, exception=exception, confidence="likely", **common)


def stopped_between_attempts(reason: str) -> Verdict:
    """Asked to stop while no rank was running."""
    failure, why = _STOP_CLASS[reason]
    return Verdict(failure=failure, reason=f"{why}, between two attempts")

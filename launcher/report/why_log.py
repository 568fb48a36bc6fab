"""The output of `launcher why --log`: judge the output of a program that launcher did not start."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from launcher.diagnosis.cause import Candidate, Cause, cause_of, clues_of_text, label_of, other_sentence
from launcher.diagnosis.clue import CLASS_OF, MEMORY_OF, Clue
from launcher.diagnosis.memory import sizes
from launcher.diagnosis.remedies import remedy_of
from launcher.report.why import cut, memory_text
from launcher.spec.failures import FAILURES, OF_THE_CLUSTER
from launcher.spec.verdict import FailureClass, OutOfMemory
from launcher.supervise.policy import SHARED_MEMORY, THEN

MAX_OTHERS = 5


def judged_log(lines: Iterable[bytes]) -> Cause | None:
    """Return the cause of a failure from its output alone, or None if no line shows one."""
    return cause_of(Candidate(clue) for clue in clues_of_text(lines))


def why_log(name: str, cause: Cause | None) -> list[str]:
    """Return the class, the decisive line and its place, and why other findings are not decisive."""
    if cause is None:
        return [f"{name}: unknown: no line shows a failure"]
    clue = cause.candidate.clue
    label = f", of {clue.label.rstrip(':')}" if clue.label else ""
    lines = [f"{name}: {cause.failure} ({cause.confidence}){label}"]
    lines += [f"  | {cut(line)}" for line in clue.before if line.strip()]
    lines += [f"line      {cut(f'{name}:{clue.line}  {clue.text}')}"]
    lines += [f"  | {cut(line)}" for line in clue.after[:3] if line.strip()]
    if memory := memory_text(memory_of(clue)):
        lines.append(f"memory    {memory}")
    for other, why in _distinct(cause):
        text = f"{other_sentence(CLASS_OF[other.kind], why)}: {name}:{other.line}  {other.text}"
        lines.append(f"{label_of(why):<10}{cut(text)}")
    if advice := advice_of(cause.failure, clue):
        lines.append(f"do        {advice}")
    if cause.failure in OF_THE_CLUSTER:
        lines.append("examine   launcher doctor -c CLUSTER")
    return lines


def as_json(cause: Cause | None) -> dict[str, Any]:
    """Return the cause as JSON data."""
    if cause is None:
        return {"failure": "unknown", "confidence": "guess", "seen": []}
    memory = memory_of(cause.candidate.clue)
    seen = [(cause.candidate.clue, ""), *((other, why) for other, why in _distinct(cause))]
    return {
        "failure": cause.failure,
        "confidence": cause.confidence,
        "memory": memory.model_dump() if memory is not None else None,
        "seen": [
            {"failure": CLASS_OF[clue.kind], "line": clue.line, "text": clue.text, "why": why}
            for clue, why in seen
        ],
    }


def memory_of(clue: Clue) -> OutOfMemory | None:
    """Return which memory ran out, with the sizes stated in the lines."""
    if clue.kind not in MEMORY_OF:
        return None
    return OutOfMemory(kind=MEMORY_OF[clue.kind], **sizes(clue.memory_text))


def advice_of(failure: FailureClass, clue: Clue) -> str:
    """Return what to do, without advice that applies only to launcher's own runs."""
    if clue.kind == "shared-memory":
        return SHARED_MEMORY
    if remedy := remedy_of(failure, [clue.text]):
        return remedy
    advice = FAILURES[failure].advice.partition(THEN)[0].partition(": `launcher")[0]
    return "" if "`launcher" in advice else advice


def _distinct(cause: Cause) -> list[tuple[Clue, str]]:
    """Return one clue for each kind and reason."""
    by_kind: dict[tuple[str, str], tuple[Clue, str]] = {}
    for other, why in cause.others:
        by_kind.setdefault((other.clue.kind, why), (other.clue, why))
    return list(by_kind.values())[:MAX_OTHERS]

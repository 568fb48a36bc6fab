"""Judge measured values by the table of checks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from launcher.doctor.checks import CHECKS
from launcher.doctor.checks.row import Check
from launcher.doctor.values import Expected, Finding, Measured, Opinion, Verdict

ORDER: dict[Verdict, int] = {"good": 0, "poor": 1, "broken": 2}


def examine(values: Iterable[Measured], expected: Expected) -> list[Finding]:
    """Return a finding for each value, in the order of the table. Equal findings are one."""
    known = [value for value in values if value.check in CHECKS]
    found = [_judged(value, CHECKS[value.check], expected) for value in known]
    for check in CHECKS.values():
        if check.alike != "good":
            found += _differences([value for value in known if value.check == check.name], check)
    place = list(CHECKS)
    return sorted(_merged(found), key=lambda one: place.index(one.check))


def worst(findings: Iterable[Finding]) -> Verdict:
    """Return the worst verdict; `good` if there is no finding."""
    return max((one.verdict for one in findings), key=ORDER.__getitem__, default="good")


def _judged(value: Measured, check: Check, expected: Expected) -> Finding:
    if value.error:
        opinion = check.unmeasured
        opinion = opinion._replace(cause=f"{opinion.cause} {_sentence(value.error)}".strip())
        return _finding(value, check, opinion, "-" if value.value is None else check.show(value.value))
    return _finding(value, check, check.judge(value, expected), check.show(value.value))


def _sentence(text: str) -> str:
    return text if text.endswith(".") else f"{text}."


def _finding(value: Measured, check: Check, opinion: Opinion, shown: str) -> Finding:
    return Finding(
        check.name, check.title, check.part, opinion.verdict, (value.node,),
        (value.subject,) if value.subject else (), shown, opinion.expected, opinion.cause, opinion.cure,
    )  # fmt: skip


def _differences(values: Sequence[Measured], check: Check) -> list[Finding]:
    """Return a finding if nodes have different values of a check that should be alike."""
    by_text: dict[str, list[int]] = {}
    for value in values:
        if value.value is not None:
            by_text.setdefault(check.show(value.value), []).append(value.node)
    if len(by_text) < 2:
        return []
    told = "; ".join(f"{text} on node {spans(nodes)}" for text, nodes in by_text.items())
    cause = f"The nodes differ: {told}."
    few = min(by_text.values(), key=len)
    return [
        Finding(
            check.name, check.title, check.part, check.alike, tuple(few), (), "differs", "all alike",
            cause, "Install the same environment on all nodes, or leave the other nodes out.",
        )
    ]  # fmt: skip


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """Unite findings that differ in their nodes and subjects only."""
    groups: dict[Finding, tuple[dict[int, None], dict[str, None]]] = {}
    for one in findings:
        nodes, subjects = groups.setdefault(replace(one, nodes=(), subjects=()), ({}, {}))
        nodes.update(dict.fromkeys(one.nodes))
        subjects.update(dict.fromkeys(one.subjects))
    return [
        replace(one, nodes=tuple(nodes), subjects=tuple(subjects))
        for one, (nodes, subjects) in groups.items()
    ]


def spans(numbers: Iterable[int]) -> str:
    """Write numbers as ranges: `0-3,7`."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in found)

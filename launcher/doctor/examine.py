"""Judge measured values by the table of checks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from launcher.doctor.checks import CHECKS
from launcher.doctor.checks.row import Check
from launcher.doctor.values import Expected, Finding, Measured, Opinion, Verdict

ORDER: dict[Verdict, int] = {"good": 0, "poor": 1, "broken": 2}


def examine(values: Iterable[Measured], expected: Expected) -> list[Finding]:
    """Return a finding for each value, in the order of the table. Equal findings are merged."""
    known_values = [value for value in values if value.check in CHECKS]
    findings: list[Finding] = []
    for check in CHECKS.values():
        values_of_check = [value for value in known_values if value.check == check.name]
        judged = [(value, _judge(value, check, expected)) for value in values_of_check]
        findings += _good(check, [pair for pair in judged if pair[1].verdict == "good"])
        findings += _bad(check, [pair for pair in judged if pair[1].verdict != "good"])
        findings += _differences(values_of_check, check) if check.alike != "good" else []
    return findings


def _good(check: Check, judged: Sequence[tuple[Measured, Finding]]) -> list[Finding]:
    """Merge good findings of all nodes, per subject; connections between nodes are merged into one."""
    groups: dict[tuple[object, ...], list[tuple[Measured, Finding]]] = {}
    for value, finding in judged:
        subjects = finding.subjects if not _is_connection(check) and "GPU" not in value.subject else ()
        groups.setdefault((subjects, finding.expected), []).append((value, finding))
    merged = []
    for group in groups.values():
        shown = _range(check, [value.value for value, _ in group])
        # If all connections between nodes are good, their names are omitted.
        alike = [replace(finding, measured=shown, cause="") for _, finding in group]
        if _is_connection(check):
            alike = [replace(finding, subjects=()) for finding in alike]
        merged += _merged(alike)
    return merged


def _is_connection(check: Check) -> bool:
    """Return whether a check is about connections between nodes."""
    return check.part == "network" and not check.of_node


def _bad(check: Check, judged: Sequence[tuple[Measured, Finding]]) -> list[Finding]:
    """Merge findings with the same cause and cure, even if their numbers differ."""
    groups: dict[Finding, list[Any]] = {}
    for value, finding in judged:
        if _is_number(value.value):
            groups.setdefault(replace(finding, measured="", nodes=(), subjects=()), []).append(value.value)
    merged = []
    for value, finding in judged:
        alike = groups.get(replace(finding, measured="", nodes=(), subjects=()))
        shown = _range(check, alike) if alike and _is_number(value.value) else finding.measured
        merged.append(replace(finding, measured=shown))
    return _merged(merged)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _range(check: Check, values: Sequence[Any]) -> str:
    """Return the values as text: the smallest and the largest number, or the first texts."""
    texts = list(dict.fromkeys("-" if value is None else check.show(value) for value in values))
    if len(texts) > 1 and all(map(_is_number, values)):
        texts = list(dict.fromkeys((check.show(min(values)), check.show(max(values)))))
        return " to ".join(texts)
    return "; ".join(texts) if len(texts) <= 3 else f"{'; '.join(texts[:2])}; {len(texts) - 2} others"


def worst(findings: Iterable[Finding]) -> Verdict:
    """Return the worst verdict; `good` if there is no finding."""
    return max((finding.verdict for finding in findings), key=ORDER.__getitem__, default="good")


def _judge(value: Measured, check: Check, expected: Expected) -> Finding:
    if value.error or value.value is None:
        opinion = check.unmeasured
        if value.error:
            opinion = opinion._replace(cause=f"{opinion.cause} {_sentence(value.error)}".strip())
        return _finding(value, check, opinion, "-" if value.value is None else check.show(value.value))
    return _finding(value, check, check.judge(value, expected), check.show(value.value))


def _sentence(text: str) -> str:
    return text if text.endswith(".") else f"{text}."


def _finding(value: Measured, check: Check, opinion: Opinion, shown: str) -> Finding:
    return Finding(
        check.name, check.title, check.part, opinion.verdict, (value.node,) if check.of_node else (),
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
    differences = "; ".join(f"{text} on node {spans(nodes)}" for text, nodes in by_text.items())
    cause = f"The nodes differ: {differences}."
    few = min(by_text.values(), key=len)
    return [
        Finding(
            check.name, check.title, check.part, check.alike, tuple(few), (), "differs", "all alike",
            cause, check.alike_cure,
        )
    ]  # fmt: skip


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """Merge findings that differ only in their nodes and subjects."""
    groups: dict[Finding, tuple[dict[int, None], dict[str, None]]] = {}
    for finding in findings:
        nodes, subjects = groups.setdefault(replace(finding, nodes=(), subjects=()), ({}, {}))
        nodes.update(dict.fromkeys(finding.nodes))
        subjects.update(dict.fromkeys(finding.subjects))
    return [
        replace(finding, nodes=tuple(nodes), subjects=tuple(subjects))
        for finding, (nodes, subjects) in groups.items()
    ]


def spans(numbers: Iterable[int]) -> str:
    """Write numbers as ranges: `0-3,7`."""
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)

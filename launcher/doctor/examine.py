"""Judge measured values by the table of checks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from launcher.doctor.checks import CHECKS
from launcher.doctor.checks.row import Check
from launcher.doctor.values import Expected, Finding, Measured, Verdict
from launcher.logs.files import ranges

ORDER: dict[Verdict, int] = {"good": 0, "poor": 1, "broken": 2}


def examine(values: Iterable[Measured], expected: Expected) -> list[Finding]:
    """Return the findings in the order of the table; of each check, good ones come first."""
    values = list(values)
    findings: list[Finding] = []
    for check in CHECKS.values():
        values_of_check = [value for value in values if value.check == check.name]
        findings += _merged(check, [(value, _judge(value, check, expected)) for value in values_of_check])
        findings += _differences(values_of_check, check) if check.alike != "good" else []
    return findings


def _merged(check: Check, judged: Sequence[tuple[Measured, Finding]]) -> list[Finding]:
    """Merge findings of the same kind, whatever their nodes and numbers are."""
    groups: dict[Finding, list[tuple[Measured, Finding]]] = {}
    for value, finding in judged:
        is_good = finding.verdict == "good"
        kind = replace(
            finding,
            nodes=(),
            subjects=finding.subjects if is_good and "GPU" not in value.subject else (),
            measured="" if is_good or _is_number(value.value) else finding.measured,
        )
        groups.setdefault(kind, []).append((value, finding))
    merged = [
        replace(
            kind,
            nodes=tuple(dict.fromkeys(node for _, finding in group for node in finding.nodes)),
            subjects=tuple(dict.fromkeys(subject for _, finding in group for subject in finding.subjects)),
            measured=_range(check, [value.value for value, _ in group]),
        )
        for kind, group in groups.items()
    ]
    return sorted(merged, key=lambda finding: finding.verdict != "good")


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
    shown = "-" if value.value is None else check.show(value.value)
    if value.error or value.value is None:
        opinion = check.unmeasured
        if value.error:
            opinion = opinion._replace(cause=f"{opinion.cause} {_sentence(value.error)}".strip())
    else:
        opinion = check.judge(value, expected)
    subjects = (value.subject,) if value.subject else ()
    if opinion.verdict == "good":
        opinion = opinion._replace(cause="")
        if check.part == "network" and not check.of_node:  # good connections need no names
            subjects = ()
    return Finding(
        check.name, check.title, check.part, opinion.verdict, (value.node,) if check.of_node else (),
        subjects, shown, opinion.expected, opinion.cause, opinion.cure,
    )  # fmt: skip


def _sentence(text: str) -> str:
    return text if text.endswith(".") else f"{text}."


def _differences(values: Sequence[Measured], check: Check) -> list[Finding]:
    """Return a finding if nodes have different values of a check that should be alike."""
    by_text: dict[str, list[int]] = {}
    for value in values:
        if value.value is not None:
            by_text.setdefault(check.show(value.value), []).append(value.node)
    if len(by_text) < 2:
        return []
    differences = "; ".join(f"{text} on node {ranges(nodes)}" for text, nodes in by_text.items())
    cause = f"The nodes differ: {differences}."
    few = min(by_text.values(), key=len)
    return [
        Finding(
            check.name, check.title, check.part, check.alike, tuple(few), (), "differs", "all alike",
            cause, check.alike_cure,
        )
    ]  # fmt: skip

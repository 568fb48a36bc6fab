"""Compare the findings with those of an earlier run of the doctor. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from launcher.doctor.examine import ORDER
from launcher.doctor.values import Finding
from launcher.spec.one_line import plain

Key = tuple[str, tuple[str, ...]]


def changes(before: Iterable[Finding], now: Iterable[Finding]) -> list[str]:
    """Return a line for each check with a changed verdict, or, for checks in REPORTED, a changed value."""
    old, new = _worst(before), _worst(now)
    lines = []
    for key, finding in new.items():
        earlier = old.get(key)
        if earlier is None:
            if finding.verdict != "good":
                lines.append(f"{_name(finding)}: {finding.verdict}, {finding.measured}; not measured before")
        elif earlier.verdict != finding.verdict or (
            earlier.measured != finding.measured and finding.check in REPORTED
        ):
            was = f"{earlier.verdict}, {earlier.measured}"
            lines.append(f"{_name(finding)}: {was} -> {finding.verdict}, {finding.measured}")
    return lines


REPORTED = frozenset(
    {"torch", "launcher", "python", "bitsandbytes", "driver", "gpus", "cpus", "shm", "mtu", "interfaces"}
)
"Checks for which a changed value is reported even if both are good: versions and sizes that do not vary."


def _name(finding: Finding) -> str:
    return ", ".join([finding.title, *finding.subjects])


def _worst(findings: Iterable[Finding]) -> dict[Key, Finding]:
    """Return the worst finding of each check and subject."""
    worst: dict[Key, Finding] = {}
    for finding in findings:
        key = (finding.check, finding.subjects if finding.part == "node" else ())
        if key not in worst or ORDER[finding.verdict] > ORDER[worst[key].verdict]:
            worst[key] = finding
    return worst


def lines(name: str, changes: Sequence[str], *, complete: bool = True) -> list[str]:
    """Format the changes. `name` is the earlier run; `complete` says whether everything was examined now."""
    if changes:
        return [f"changed since {name}:", *(f"  {plain(line)}" for line in changes)]
    return [f"as in {name}" + ", as far as it was examined" * (not complete)]

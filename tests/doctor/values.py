"""Measured values and findings, shortly."""

from __future__ import annotations

from typing import Any

from launcher.doctor.examine import examine
from launcher.doctor.values import Expected, Finding, Measured


def finding(check: str, value: Any, expected: Expected | None = None, error: str = "") -> Finding:
    """The finding about one value."""
    [found] = examine([Measured(check, 0, value, error=error)], expected or Expected())
    return found


def verdicts(values: list[Measured], expected: Expected | None = None) -> dict[str, str]:
    """Verdict by check, without those that are good."""
    found = examine(values, expected or Expected())
    return {one.check: one.verdict for one in found if one.verdict != "good"}

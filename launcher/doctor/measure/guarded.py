"""Measure one value, and record the error if that fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from launcher.doctor.values import Measured


def guarded(check: str, node: int, measure: Callable[[], Any], subject: str = "") -> Measured:
    """Return what `measure` returns as a measured value. An exception becomes its error."""
    try:
        return Measured(check, node, measure(), subject)
    except Exception as error:  # every failure here is a finding
        return Measured(check, node, None, subject, reason_of(error))


def reason_of(error: BaseException) -> str:
    """Return an error's message on one line; for a system error, without its number."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return (text or type(error).__name__).splitlines()[0][:300]

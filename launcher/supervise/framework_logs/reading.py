"""What a framework's log tells of one step, and how frameworks count steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

MAX_NUMBER = 2.0**1023
"JSON may hold larger integers, which are no floats."


class Reading(NamedTuple):
    """What a log tells of one step."""

    step: int
    "As the framework counts it."
    metrics: Mapping[str, Any]
    "Under the framework's names."
    time: float | None = None
    "When it was logged, in Unix seconds; None if the log does not tell."
    written: float | None = None
    "When its file was written, in Unix seconds, if `time` is None."
    steps: int | None = None
    "Steps of the whole training."
    first: int | None = None
    "Number of the first step, 0 or 1; None if the log does not tell."


class LogReader(Protocol):
    """Reads one log."""

    def read(self) -> list[Reading]:
        """Return what was added since the last call. Raises OSError, and anything else for another
        format."""


def number(value: object) -> float | None:
    """Return a finite number as such; None for everything else that a log may contain."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) < MAX_NUMBER else None

"""One step in a framework's log, and how frameworks count steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

MAX_NUMBER = 2.0**1023
"JSON may hold larger integers, which do not fit into a float."


class Reading(NamedTuple):
    """One step in a log."""

    step: int
    "The step as the framework counts it."
    metrics: Mapping[str, Any]
    "Metrics under the framework's names."
    time: float | None = None
    "When the step was logged, in Unix seconds; None if unknown."
    written: float | None = None
    "When the file was written, in Unix seconds, if `time` is None."
    steps: int | None = None
    "Number of steps of the whole training."
    first: int | None = None
    "Number of the first step, 0 or 1; None if unknown."


class LogReader(Protocol):
    """Reads one log."""

    def read(self) -> list[Reading]:
        """Return what was added since the last call.

        Raises OSError if the file cannot be read, and any other exception if it has another format.
        """


def number(value: object) -> float | None:
    """Return a finite number unchanged, and None for everything else that a log may contain."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) < MAX_NUMBER else None

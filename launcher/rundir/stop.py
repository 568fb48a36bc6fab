"""The files that ask ranks or supervisors to stop."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from launcher.rundir.files import open_regular, replace_text

MAX_TEXT = 4096
"Maximum bytes that are read of such a file."


class StopRequest(NamedTuple):
    """A request to stop."""

    reason: str = ""
    "`cancelled`, `time-limit`, `preempted`, for a supervisor also `node-failed`; empty without a request."
    killed_at: float | None = None
    "When remaining processes are killed, in seconds since the epoch; None if it is not known."
    left: float | None = None
    "The same in seconds after the request, from a batch script: the clock of its node may differ."

    def seconds_left(self) -> float | None:
        """Return the seconds until remaining processes are killed; None if unknown."""
        if self.left is None and self.killed_at is not None:  # a script that an earlier version has rendered
            return self.killed_at - time.time()
        return self.left


def read_stop_request(path: Path) -> StopRequest:
    """Read a request: `REASON KILLED_AT` for ranks, `REASON +LEFT` for a supervisor."""
    reason, number = [*read_text(path).split(), "", ""][:2]
    sign, digits = number[:1] == "+", number.removeprefix("+")[:12]
    seconds = float(digits) if digits.isdecimal() else None
    return StopRequest(reason, None, seconds) if sign else StopRequest(reason, seconds)


def write_stop_request(path: Path, reason: str, killed_at: float) -> None:
    """Write a request. Raises OSError."""
    replace_text(path, f"{reason} {killed_at:.0f}\n")


def write_cancel_request(path: Path) -> None:
    """Add a line to a run's `cancel` file. Raises OSError.

    A second request means more than the first one, and the supervisor may read both at once.
    """
    replace_text(path, f"{read_text(path)}{time.time()}\n")


def cancel_requests(text: str, seen: str) -> int:
    """Return how many requests a `cancel` file has got since it had the text `seen`."""
    return len(text.removeprefix(seen).splitlines())


def read_text(path: Path) -> str:
    """The beginning of a file; empty if it cannot be read."""
    try:
        with open_regular(path) as file:
            return file.read(MAX_TEXT).decode(errors="replace")
    except OSError:
        return ""

"""The files that ask ranks, and by a batch script their supervisor, to stop: why, and how long they have."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from launcher.rundir.files import open_regular, replace_text

MAX_TEXT = 4096
"Bytes of such a file that are read."


class StopRequest(NamedTuple):
    reason: str = ""
    "`cancelled`, `time-limit` or `preempted`; empty: there is no request."
    killed_at: float | None = None
    "When what is left is killed, in seconds since the epoch. None: nobody knows."


def read_stop_request(path: Path) -> StopRequest:
    words = read_text(path).split()
    killed_at = words[1] if len(words) > 1 and words[1].isdecimal() else ""
    return StopRequest(words[0] if words else "", float(killed_at[:12]) if killed_at else None)


def write_stop_request(path: Path, reason: str, killed_at: float) -> None:
    """Raises OSError."""
    replace_text(path, f"{reason} {killed_at:.0f}\n")


def read_text(path: Path) -> str:
    """Its beginning; empty when it cannot be read."""
    try:
        with open_regular(path) as file:
            return file.read(MAX_TEXT).decode(errors="replace")
    except OSError:
        return ""

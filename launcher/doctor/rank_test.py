"""A test that several ranks run together, and the report of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RankTest:
    """A test: what its ranks do, and how they reach each other."""

    what: str
    "Name of a function in `ranks.TESTS`."
    options: Mapping[str, Any]
    ranks: tuple[int, ...]
    "Global ranks that take part. Their positions in this tuple are their ranks in the test's process group."
    host: str
    port: int
    "Port at which the first of these ranks serves the store."
    seconds: float
    "Time limit."
    env: Mapping[str, str] = field(default_factory=dict)
    "Environment variables to try."


@dataclass(frozen=True)
class RankReport:
    """The report of one rank."""

    rank: int
    "Global rank."
    ended: bool
    "False if the rank was still running at the time limit."
    at: str = ""
    "The last step that the rank began."
    done: int = 0
    "Number of steps that the rank has finished."
    results: tuple[Mapping[str, Any], ...] = ()
    error: str = ""
    state: str = ""
    "State of a process that did not end, from proc(5): T is stopped, D waits for a device."

"""A test that several ranks run together, and what one of them tells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RankTest:
    """What the ranks of a test do, and how they reach each other."""

    what: str
    "Name of a function in `ranks.TESTS`."
    options: Mapping[str, Any]
    ranks: tuple[int, ...]
    "The ranks that take part, over all nodes. Their places in this order are the ranks of the test's group."
    host: str
    port: int
    "Where the first of them serves the store."
    seconds: float
    env: Mapping[str, str] = field(default_factory=dict)
    "Settings to try."


@dataclass(frozen=True)
class Told:
    """What one rank of this node told."""

    rank: int
    "Over all nodes."
    ended: bool
    "False if the rank was still there when the time was over."
    at: str = ""
    "The step that it began last."
    done: int = 0
    "Steps that it has finished."
    results: tuple[Mapping[str, Any], ...] = ()
    error: str = ""
    state: str = ""
    "State of a process that did not end, as in proc(5): T is stopped, D waits for a device."

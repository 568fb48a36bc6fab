"""Failure logs from public threads, each with its class and its source. See README.md."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ruamel.yaml import YAML

FOLDER = Path(__file__).parent


class Log(NamedTuple):
    source: str
    failure: str
    "The class that a person gives it."
    text: str
    mentions_memory: bool
    "It speaks of memory, and memory did not run out."

    @property
    def held_back(self) -> bool:
        """Whether it was not looked at while the table of patterns was written: a third, by its source."""
        return int(hashlib.sha256(self.source.encode()).hexdigest(), 16) % 3 == 0


@cache
def logs() -> tuple[Log, ...]:
    entries = [
        one for path in sorted(FOLDER.glob("*.yaml")) for one in YAML(typ="safe", pure=True).load(path)
    ]
    return tuple(
        Log(one["source"], one["class"], one["log"], bool(one.get("mentions_memory"))) for one in entries
    )

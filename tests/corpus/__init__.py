"""Failure logs from public threads, each with its class and its source. See README.md."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

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


def logs() -> Iterator[Log]:
    for path in sorted(FOLDER.glob("*.yaml")):
        entries: list[dict[str, Any]] = YAML(typ="safe", pure=True).load(path)
        for one in entries:
            yield Log(one["source"], one["class"], one["log"], bool(one.get("mentions_memory")))

"""Coordinate the doctors of several nodes by orders and answers: node 0 orders, and every node answers.

Both are files in the run directory, so that nothing depends on the network under examination. They are also
the results, because every measured value is in an answer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from launcher.rundir.files import read_json, replace_json
from launcher.spec.json_forms import Form, fits

T = TypeVar("T")

TESTS = "tests"
"The order to run tests of ranks."
TRAIN = "train"
"The order to train the tiny model."
REACH = "reach"
"The order to measure the connections to other nodes."
MARK = "mark"
"The order to create files that other nodes look for."
LOOK = "look"
"The order to look for the files of other nodes."
NOTE = "note"
"The order to do nothing. Its `values` are conclusions of node 0."
END = "end"
"The last order: the examination is over."

NOTHING_ELSE: Form = {"*": frozenset()}
MEASURED: Form = {"check": str, "node": int, "value?": object, "subject?": str, "error?": str, **NOTHING_ELSE}
REPORT: Form = {
    "rank": int, "ended": bool, "at?": str, "done?": int, "results?": [dict], "error?": str, "state?": str,
    **NOTHING_ELSE,
}  # fmt: skip
ANSWER: Form = {"values?": [MEASURED], "told?": [[REPORT]], "error?": str}
ORDER: Form = {"do": str, "values?": [MEASURED], "tests?": [dict]}
POLL_SECONDS = 0.02
LIST_SECONDS = 0.5
"""How often the folder is listed, which makes a network file system query its server. Otherwise NFS caches
for half a minute that a file does not exist (nfs(5), acdirmin)."""


@dataclass(frozen=True)
class Orders:
    """One node's view of the folder of orders and answers of an attempt, `attempts/000/doctor/`."""

    folder: Path
    node: int
    nodes: int

    def give(self, number: int, order: Mapping[str, Any]) -> None:
        """Give an order. Only node 0 calls this. Raises OSError."""
        replace_json(self._order(number), order)

    def wait_for_order(self, number: int, seconds: float) -> Mapping[str, Any] | None:
        """Wait for an order of node 0 and return it, or None after `seconds`."""
        return self._wait(lambda: _read(self._order(number), ORDER), seconds)

    def answer(self, number: int, answer: Mapping[str, Any], node: int | None = None) -> None:
        """Answer an order. Node 0 also writes the answer of a `node` that cannot. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_json(self._answer(number, self.node if node is None else node), answer)

    def wait_for_answers(
        self, number: int, seconds: float, lost: Callable[[], Collection[int]]
    ) -> dict[int, Mapping[str, Any]]:
        """Return the answers that arrive within `seconds`, by node. `lost` nodes are not awaited."""

        def all_answers() -> dict[int, Mapping[str, Any]] | None:
            answers = self.answers(number)
            return answers if set(range(self.nodes)) <= {*answers, *lost()} else None

        return self._wait(all_answers, seconds) or self.answers(number)

    def answers(self, number: int) -> dict[int, Mapping[str, Any]]:
        """Return the answers that exist now, by node."""
        answers_ = {node: _read(self._answer(number, node), ANSWER) for node in range(self.nodes)}
        return {node: answer for node, answer in answers_.items() if answer is not None}

    def beat(self, pulse: Mapping[str, Any]) -> None:
        """Write this node's heartbeat. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_json(self._pulse(self.node), pulse)

    def pulses(self) -> dict[int, Mapping[str, Any]]:
        """Return the newest heartbeat of each node that has written one."""
        self._list()
        pulses_ = {node: read_json(self._pulse(node)) for node in range(self.nodes)}
        return {node: pulse for node, pulse in pulses_.items() if pulse is not None}

    def history(self) -> list[tuple[Mapping[str, Any], dict[int, Mapping[str, Any]]]]:
        """Return every order with its answers. Orders with a damaged file are left out.

        Order 0, with which each node measures itself, is never written.
        """
        damaged = set(map(_number, self.damaged())) - {0}
        numbers = sorted(set(map(_number, self._files())) - damaged)
        return [(_read(self._order(number), ORDER) or {}, self.answers(number)) for number in numbers]

    def damaged(self) -> list[Path]:
        """Return the files of orders and answers that cannot be read or have an unknown form."""
        forms = ((path, ORDER if path.name.startswith("order-") else ANSWER) for path in self._files())
        return [path for path, form in forms if _read(path, form) is None]

    def _files(self) -> list[Path]:
        return [*sorted(self.folder.glob("order-*.json")), *sorted(self.folder.glob("node-*-*.json"))]

    def _wait(self, query: Callable[[], T | None], seconds: float) -> T | None:
        """Return the first result of `query` that is not None, or None after this time."""
        now = time.monotonic()
        deadline, listed = now + seconds, now
        while (result := query()) is None and (now := time.monotonic()) < deadline:
            if now > listed + LIST_SECONDS:
                listed = now
                self._list()
            time.sleep(POLL_SECONDS)
        return result

    def _list(self) -> None:
        with suppress(OSError):
            os.listdir(self.folder)

    def _order(self, number: int) -> Path:
        return self.folder / f"order-{number:03d}.json"

    def _answer(self, number: int, node: int) -> Path:
        return self.folder / f"node-{node:02d}-{number:03d}.json"

    def _pulse(self, node: int) -> Path:
        return self.folder / f"pulse-{node:02d}.json"


def _number(path: Path) -> int:
    """Return the number of an order from the name of its file or of an answer's file."""
    return int(path.stem.rpartition("-")[2])


def _read(path: Path, form: Form) -> Any | None:
    """Return the content of a file, or None if it is missing, unreadable or of another form."""
    record = read_json(path)
    return record if fits(record, form) else None

"""Copy changed files of a run directory between nodes: Outbox sends them and Inbox writes them.

A file that grows is sent from the end of the other side's copy. Any other file is sent whole and replaced
atomically.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.rundir.contents import ATTEMPT, FILES, RunFile, expression
from launcher.rundir.files import append_json, replace_bytes
from launcher.rundir.layout import RunDir
from launcher.supervise.no_shared_folder.wire import WireError

PART = 2**20
"Maximum bytes of one file sent before the next file's turn."
_EVENTS = "events.jsonl"


@dataclass(frozen=True)
class Kind:
    """The files of one row of the table, or those of them that belong to one node."""

    row: RunFile
    node: int | None = None

    @property
    def grows(self) -> bool:
        return self.row.change == "grows"

    def covers(self, path: str) -> bool:
        if path.startswith("attempts/") and re.match(r"attempts/\d+(-save)?/", path) is None:
            return False
        return re.fullmatch(expression(self.row.path, self.node), path) is not None

    def paths(self, run: RunDir, attempts: Sequence[str]) -> Iterator[str]:
        for attempt in attempts if self.row.path.startswith(ATTEMPT) else ("",):
            path = self.row.path.replace(ATTEMPT, f"attempts/{attempt}")
            if self.node is not None:
                path = path.replace("{node}", f"{self.node:02d}")
            folder, _, name = path.rpartition("/")
            try:
                names = sorted(os.listdir(run.path / folder))
            except (FileNotFoundError, NotADirectoryError):
                continue
            yield from (f"{folder}/{one}".lstrip("/") for one in names if re.fullmatch(expression(name), one))


def up(node: int) -> tuple[Kind, ...]:
    """Return the files that another node sends to node 0.

    Both sides may write `stop`. That is harmless, because rank 0 on node 0 handles it.
    """
    return tuple(Kind(row, node) for row in FILES if row.nodes == "to node 0")


DOWN = tuple(Kind(row) for row in FILES if row.nodes == "from node 0")
"Files that node 0 sends to the others."


class Outbox:
    """The changes that the other side of one connection does not have yet."""

    def __init__(self, run: RunDir, kinds: Sequence[Kind], there: Mapping[str, int]) -> None:
        """`there`: the size of the other side's copy of each file that grows."""
        self.run, self.kinds = run, kinds
        self._ends = dict(there)
        self._known: set[str] = set()
        self._seen: dict[str, tuple[int, int, int]] = {}
        self._first = True

    def news(self, *, final: bool = False) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Yield messages. Each counts as sent when the next one is requested. `final`: send torn lines too.

        Files are read in the reverse of the order in which they are sent: if one shows that others are
        complete, those are read after it.
        """
        attempts = [attempt.path.name for attempt in self.run.starts()]
        attempts, self._first = attempts if self._first else attempts[-2:], False
        wholes = [
            changed
            for kind in reversed(self.kinds)
            if not kind.grows
            for path in kind.paths(self.run, attempts)
            if (changed := self._changed(path)) is not None
        ]
        behind = False
        for kind in self.kinds:
            for path in kind.paths(self.run, attempts) if kind.grows else ():
                start, data, more = self._end(path, final)
                if data or path not in self._known:
                    yield {"path": path, "from": start}, data
                    self._known.add(path)
                    self._ends[path] = start + len(data)
                behind |= more
        for path, seen, data in reversed(wholes):
            if not (behind and path.endswith(".ended.json")):  # its node's lines are sent first
                yield {"path": path}, data
                self._seen[path] = seen

    def _changed(self, path: str) -> tuple[str, tuple[int, int, int], bytes] | None:
        try:
            with open(self.run.path / path, "rb") as file:
                now = os.fstat(file.fileno())
                seen = (now.st_ino, now.st_mtime_ns, now.st_size)
                return (path, seen, file.read()) if self._seen.get(path) != seen else None
        except FileNotFoundError:
            return None

    def _end(self, path: str, final: bool) -> tuple[int, bytes, bool]:
        """Return (start, data, whether there is more). Sends whole lines, unless a line exceeds PART."""
        with open(self.run.path / path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = self._ends.get(path, 0)
            if start > size:  # this host's file was emptied in the meantime
                start = 0
            file.seek(start)
            data = file.read(PART)
        more = len(data) == PART
        if more or not final:
            lines = data[: data.rfind(b"\n") + 1]
            data = lines if lines or not more else data
        return start, data, more


class Inbox:
    """Writes what another node's Outbox sends. Refuses files outside of `kinds`."""

    def __init__(self, run: RunDir, kinds: Sequence[Kind], node: int) -> None:
        self.run, self.kinds, self.node = run, kinds, node

    def sizes(self) -> dict[str, int]:
        """Return the size of this node's copy of each file that grows."""
        attempts = [attempt.path.name for attempt in self.run.starts()]
        paths = [path for kind in self.kinds if kind.grows for path in kind.paths(self.run, attempts)]
        files = {path: self._file(path) for path in [*paths, _EVENTS]}
        return {path: file.stat().st_size for path, file in files.items() if file.exists()}

    def grows(self, path: str) -> bool:
        return any(kind.grows and kind.covers(path) for kind in self.kinds)

    def take(self, about: Mapping[str, Any], data: bytes) -> None:
        """Write one message. Raises OSError, or WireError if the other side may not write the file."""
        path = str(about["path"])
        kind = next((kind for kind in self.kinds if kind.covers(path)), None)
        if kind is None:
            raise WireError(f"node {self.node} may not write {path!r}")
        file = self._file(path)
        if not kind.grows:
            if _holds(file, data):
                os.utime(file)  # a heartbeat, which needs no space on a full disk
            else:
                replace_bytes(file, data)
            return
        self._write_piece(file, path, int(about["from"]), data)
        if path == _EVENTS:
            try:
                self._append_events(data)
            except OSError:
                os.truncate(file, about["from"])  # so that the lines are sent again
                raise

    def _write_piece(self, file: Path, path: str, start: int, data: bytes) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "r+b" if file.exists() else "w+b") as to:
            if start == 0:
                to.truncate()
            elif start > to.seek(0, os.SEEK_END):
                raise WireError(f"a piece of {path} is missing")
            to.seek(start)
            to.write(data)

    def _file(self, path: str) -> Path:
        """Return where to write a file. Another node's events go into a file of their own.

        Their lines are then appended to this node's events, which is the file that is read.
        """
        return self.run.path / (f"nodes/events-{self.node:02d}.jsonl" if path == _EVENTS else path)

    def _append_events(self, lines: bytes) -> None:
        events = []
        for line in lines.splitlines():
            try:
                events.append(json.loads(line))
            except ValueError:
                continue  # a torn line, because that node's disk was full
        if events:
            append_json(self.run.events, *events)


def _holds(file: Path, data: bytes) -> bool:
    try:
        return file.read_bytes() == data
    except FileNotFoundError:
        return False

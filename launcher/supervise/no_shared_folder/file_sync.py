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

from launcher.rundir.file_table import ATTEMPT, FILES, RunFile, expression
from launcher.rundir.files import append_json, replace_bytes
from launcher.rundir.layout import RunDir
from launcher.supervise.no_shared_folder.wire import WireError

PART = 2**20
"Maximum bytes of one file sent before the next file's turn."
_EVENTS = "events.jsonl"


@dataclass(frozen=True)
class Kind:
    """The files of one row of the table of run files, or only those of one node."""

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
            yield from (
                f"{folder}/{name_}".lstrip("/") for name_ in names if re.fullmatch(expression(name), name_)
            )


def up(node: int) -> tuple[Kind, ...]:
    """Return the files that another node sends to node 0.

    Both sides may write `stop`, which is harmless, because rank 0 on node 0 handles it.
    """
    return tuple(Kind(row, node) for row in FILES if row.nodes == "to node 0")


DOWN = tuple(Kind(row) for row in FILES if row.nodes == "from node 0")
"Files that node 0 sends to the others."


class Outbox:
    """The changes that the other side of one connection does not have yet."""

    def __init__(self, run: RunDir, kinds: Sequence[Kind], remote_sizes: Mapping[str, int]) -> None:
        """`remote_sizes`: the size of the other side's copy of each file that grows."""
        self.run, self.kinds = run, kinds
        self._ends = dict(remote_sizes)
        self._announced: set[str] = set()
        self._sent_versions: dict[str, tuple[int, int, int]] = {}
        self._first = True

    def news(self, *, final: bool = False) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Yield messages. Each counts as sent when the next one is requested. `final`: send torn lines too.

        Files are read in the reverse order of sending: if one file shows that others are complete, those are
        read after it.
        """
        attempts = [attempt.path.name for attempt in self.run.starts()]
        attempts, self._first = attempts if self._first else attempts[-2:], False
        changed_files = [
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
                if data or path not in self._announced:
                    yield {"path": path, "from": start}, data
                    self._announced.add(path)
                    self._ends[path] = start + len(data)
                behind |= more
        for path, version, data in reversed(changed_files):
            if not (behind and path.endswith(".ended.json")):  # the node's remaining lines are sent first
                yield {"path": path}, data
                self._sent_versions[path] = version

    def _changed(self, path: str) -> tuple[str, tuple[int, int, int], bytes] | None:
        try:
            with open(self.run.path / path, "rb") as file:
                status = os.fstat(file.fileno())
                version = (status.st_ino, status.st_mtime_ns, status.st_size)
                return (path, version, file.read()) if self._sent_versions.get(path) != version else None
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

    def take(self, header: Mapping[str, Any], data: bytes) -> None:
        """Write one message. Raises OSError, or WireError if the other side may not write the file."""
        path = str(header["path"])
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
        self._write_piece(file, path, int(header["from"]), data)
        if path == _EVENTS:
            try:
                self._append_events(data)
            except OSError:
                os.truncate(file, header["from"])  # so that the lines are sent again
                raise

    def _write_piece(self, file: Path, path: str, start: int, data: bytes) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "r+b" if file.exists() else "w+b") as target:
            if start == 0:
                target.truncate()
            elif start > target.seek(0, os.SEEK_END):
                raise WireError(f"a piece of {path} is missing")
            target.seek(start)
            target.write(data)

    def _file(self, path: str) -> Path:
        """Return where to write a file. Another node's events go into a separate file.

        Their lines are then appended to this node's events.jsonl, the only one that is read.
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

"""Find the log files of a run's ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from launcher.rundir.layout import AttemptDir, RunDir

_NAME = re.compile(r"rank-(\d+)\.(out|err)")
_NODE = re.compile(r"node-(\d+)")


@dataclass(frozen=True)
class RankFile:
    """One stream of one rank in one attempt. `stream` is `out` or `err`."""

    path: Path
    attempt: int
    node: int
    rank: int
    stream: str


def parse_selection(text: str, what: str = "rank") -> frozenset[int]:
    """`"0,3-5"` -> {0, 3, 4, 5}. Raises ValueError with the reason."""
    chosen: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,7})\s*(?:-\s*(\d{1,7})\s*)?", part)
        if match is None:
            raise ValueError(f"{part.strip()!r} is not a {what}; write for example 0,3-5")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"{part.strip()!r}: the {what}s go backwards; write {last}-{first}")
        chosen.update(range(first, last + 1))
    return frozenset(chosen)


def attempt_files(
    attempt: AttemptDir,
    ranks: Collection[int] | None = None,
    nodes: Collection[int] | None = None,
    streams: Collection[str] = ("out", "err"),
) -> list[RankFile]:
    """The existing rank files of one attempt, by rank and stream (out before err). None selects all."""
    files = []
    number = attempt.number
    for folder in _names(attempt.logs):
        node = _NODE.fullmatch(folder)
        if node is None or (nodes is not None and int(node[1]) not in nodes):
            continue
        for name in _names(attempt.logs / folder):
            match = _NAME.fullmatch(name)
            if match is None or match[2] not in streams or (ranks is not None and int(match[1]) not in ranks):
                continue
            path = attempt.logs / folder / name
            files.append(RankFile(path, number, int(node[1]), int(match[1]), match[2]))
    return sorted(files, key=lambda file: (file.rank, file.stream != "out", file.node))


def check_selection(
    run: RunDir, attempt: int | None, ranks: Collection[int] | None, nodes: Collection[int] | None
) -> None:
    """Raise ValueError for a selected attempt, node or rank that the run does not have (yet)."""
    attempts = [start for start in run.starts() if attempt in (None, start.number)]
    if attempt is not None and not attempts:
        raise ValueError(_missing("attempt", {attempt}, {start.number for start in run.attempts()}))
    files = [file for start in attempts for file in attempt_files(start)]
    if nodes is not None:
        known = {file.node for file in files}
        if not known.issuperset(nodes):
            raise ValueError(_missing("node", set(nodes) - known, known))
        files = [file for file in files if file.node in nodes]
    if ranks is not None:
        known = {file.rank for file in files}
        if not known.issuperset(ranks):
            where = " there" if nodes is not None else ""
            raise ValueError(_missing("rank", set(ranks) - known, known, where))


def _missing(what: str, wanted: set[int], known: set[int], where: str = "") -> str:
    """A message such as `no rank 9; there are 0-1`."""
    no = f"no {what} {ranges(wanted)}{where}"
    if not known:
        return f"{no}: nothing was written yet"
    return f"{no}; there {'is only' if len(known) == 1 else 'are'} {ranges(known)}"


def ranges(numbers: Iterable[int]) -> str:
    """{0, 3, 4, 5} -> `"0,3-5"`, the syntax of parse_selection."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def _names(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in os.scandir(folder)]
    except (FileNotFoundError, NotADirectoryError):
        return []

"""Find logs of frameworks in a folder that may hold anything, such as data sets and environments."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterator, Mapping, Set
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path

MAX_DEPTH = 6
"Folders below the root: `outputs/2026-11-26/09-30-00/lightning_logs/version_0` has five."
MAX_FOLDERS = 1000
MAX_ENTRIES = 2000
"Entries of one folder that are looked at."
_OF_LAUNCHER = frozenset({"attempts", "plans", "scripts"})
"Folders of a run directory that only launcher writes."


def files_named(
    patterns: Mapping[str, float], root: Path, left_out: Set[str] = frozenset()
) -> Iterator[Path]:
    """Yield files by name, those near the root first.

    `patterns`: pattern of a name -> the files that were written since that time, in Unix seconds. Other runs
    of launcher, hidden folders and Python environments are left out. So are the folders of `left_out`, named
    by their real paths, and what exceeds the limits. Each file is found once, under its real path.
    """
    waiting = deque([(os.path.realpath(root), 0)])
    seen = {waiting[0][0]}
    for _ in range(MAX_FOLDERS):
        if not waiting:
            return
        folder, depth = waiting.popleft()
        if folder in left_out:
            continue
        entries = _entries(folder)
        names = {entry.name for entry in entries}
        if "pyvenv.cfg" in names or ("run.json" in names and depth):
            continue
        of_launcher = _OF_LAUNCHER if "run.json" in names else ()
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.is_dir():
                    below = os.path.realpath(entry.path)
                    hidden = entry.name[:1] == "." or entry.name in of_launcher
                    if depth < MAX_DEPTH and not hidden and below not in seen:
                        seen.add(below)
                        waiting.append((below, depth + 1))
                elif (
                    (since := _since(entry.name, patterns)) is not None
                    and entry.is_file()  # a pipe would never be read to its end
                    and entry.stat().st_mtime >= since
                ):
                    yield Path(os.path.realpath(entry.path))


def _since(name: str, patterns: Mapping[str, float]) -> float | None:
    return next((since for pattern, since in patterns.items() if fnmatchcase(name, pattern)), None)


def _entries(folder: str) -> list[os.DirEntry[str]]:
    """Return the first entries of a folder, sorted; none if it cannot be read."""
    with contextlib.suppress(OSError), os.scandir(folder) as found:
        return sorted(islice(found, MAX_ENTRIES), key=lambda entry: entry.name)
    return []

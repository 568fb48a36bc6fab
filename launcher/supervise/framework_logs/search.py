"""Find frameworks' logs in a folder that may also hold data sets and Python environments."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterator, Mapping, Set
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path

MAX_DEPTH = 6
"Maximum depth below the root: `outputs/2026-11-26/09-30-00/lightning_logs/version_0` has five levels."
MAX_FOLDERS = 1000
MAX_ENTRIES = 2000
"Maximum number of entries to look at in one folder."
_LAUNCHER_FOLDERS = frozenset({"attempts", "plans", "scripts"})
"Folders of a run directory that only launcher writes."


def files_named(
    patterns: Mapping[str, float], root: Path, left_out: Set[str] = frozenset()
) -> Iterator[Path]:
    """Yield files whose name matches a pattern, starting near the root. Each file is found once.

    `patterns` maps each pattern to the time in Unix seconds since which the file must have been written.
    Other runs of launcher, hidden folders, Python environments, the folders in `left_out` (real paths), and
    everything beyond the limits are skipped. Paths are real paths.
    """
    waiting = deque([(os.path.realpath(root), 0)])
    visited = {waiting[0][0]}
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
        launcher_folders = _LAUNCHER_FOLDERS if "run.json" in names else ()
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.is_dir():
                    below = os.path.realpath(entry.path)
                    hidden = entry.name[:1] == "." or entry.name in launcher_folders
                    if depth < MAX_DEPTH and not hidden and below not in visited:
                        visited.add(below)
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
    with contextlib.suppress(OSError), os.scandir(folder) as scanned:
        return sorted(islice(scanned, MAX_ENTRIES), key=lambda entry: entry.name)
    return []

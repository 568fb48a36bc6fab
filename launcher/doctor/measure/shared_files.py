"""Measure whether nodes see each other's files and locks: each creates a file, and the others look for it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path

from launcher.doctor.measure.folders import lock_of_another
from launcher.doctor.measure.guarded import guarded
from launcher.doctor.values import Measured

SEEN_SECONDS = 10.0
"How long to wait until a node sees another node's file, which a network file system may show late."
CODE_FILES = 2000
"Maximum number of files of the working directory to compare."

Marks = Mapping[str, str]
"Content of the file that a node has created, by the path of its folder."


def folders_to_share(run: Path) -> list[Path]:
    """Return the folders that all nodes should share: the run's, and its checkpoints' if on another disk."""
    checkpoints = run / "checkpoints"
    shared = [run, *([checkpoints] if checkpoints.exists() else [])]
    return list({os.stat(folder).st_dev: folder for folder in reversed(shared)}.values())


class Mark:
    """The files of this node, locked while the doctor runs."""

    def __init__(self, node: int, run: Path, register: Callable[[Path], object]) -> None:
        """Create a file in every writable folder. Call `register` with each path to remove at the end."""
        self.content: dict[str, str] = {}
        self._files: list[int] = []
        for folder in folders_to_share(run):
            text, path = os.urandom(8).hex(), _path(folder, node)
            try:
                file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            except OSError:  # another check reports unwritable folders
                continue
            register(path)
            self._files.append(file)
            os.write(file, text.encode())
            os.fsync(file)
            self.content[str(folder)] = text
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # the other nodes then find no lock
                continue


def _path(folder: Path, node: int) -> Path:
    return folder / f".doctor-node-{node:02d}"


def look(node: int, other: int, marks: Marks, until: float) -> Iterator[Measured]:
    """Yield whether this node sees the files of another node, and whether that node's locks exclude it.

    Wait for files until time.monotonic() reaches `until`.
    """
    for folder, text in marks.items():
        subject, path = f"{node} to {other}, {Path(folder).name}", _path(Path(folder), other)
        seen = guarded("same-files", node, partial(_sees, path, text, until), subject)
        yield seen
        if seen.value == "seen":
            yield guarded("shared-locks", node, partial(lock_of_another, path), subject)


def _sees(path: Path, text: str, until: float) -> str:
    while True:
        try:
            text_found = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            text_found = "missing"
        if text_found == text:
            return "seen"
        if time.monotonic() > until:
            return "missing" if text_found == "missing" else "another file"
        time.sleep(0.2)
        os.listdir(path.parent)  # makes a network file system query its server again


def code_files(workdir: Path) -> str:
    """Return the number of Python files in the working directory, and a digest of their names and content."""
    files = sorted(
        islice((file for pattern in ("*.py", "*/*.py") for file in workdir.glob(pattern)), CODE_FILES)
    )
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(workdir)}\0".encode())
        digest.update(file.read_bytes())
    return f"{len(files)} files, {digest.hexdigest()[:8]}"

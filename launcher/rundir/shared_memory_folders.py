"""Folders in a node's shared memory for the ranks of a run. They are removed when the run ends."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from launcher.rundir.layout import RunDir

MEMORY = Path("/dev/shm")


def handover_folder(run: RunDir, node: int) -> Path:
    """The node's folder of the run. It is unique per run directory and node, also on one machine."""
    return _run_folder(run) / f"node-{node:02d}"


def make_handover_folder(run: RunDir, node: int) -> Path:
    """Create the folder for this user only. Raises OSError, also if another user has created it."""
    return _make(handover_folder(run, node))


def make_error_folder(run: RunDir, node: int, rank: int) -> Path:
    """Return an empty folder for a rank's report of its exception, in which secrets are not masked yet.

    It is in memory and for this user only. Raises OSError.
    """
    remove_error_folders(run, node, rank)  # left by an earlier attempt
    return _make(_error_folders(run, node) / f"rank-{rank:03d}")


def remove_error_folders(run: RunDir, node: int, rank: int | None = None) -> None:
    """Remove the folder of one rank, or everything that killed workers of the node have left."""
    folders = _error_folders(run, node)
    _remove(folders if rank is None else folders / f"rank-{rank:03d}")


def private_folder(folder: Path) -> Path:
    """Create the folder if it is missing.

    Raises OSError, also if other users may enter or have created it.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a directory of this user alone")
    return folder


def remove_handover(run: RunDir, node: int) -> None:
    """Remove the handover, if there is one."""
    _remove(handover_folder(run, node))


def remove_shared(run: RunDir) -> None:
    """Remove all that the run has in this host's shared memory, of each node."""
    _remove(_run_folder(run))


def with_shared(root: Path) -> Iterator[RunDir]:
    """Yield the runs of the folder `root` that have something in this host's shared memory."""
    with contextlib.suppress(OSError):
        for folder in list(_user_folder().iterdir()):
            run = RunDir(root / folder.name.rpartition("-")[0])
            if _run_folder(run) == folder:
                yield run


def _make(folder: Path) -> Path:
    """Create `folder` and its parents, each for this user only, and return it. Raises OSError."""
    tries = 20
    while True:
        try:
            for part in [*reversed(_parents(folder)), folder]:
                private_folder(part)
            return folder
        except FileNotFoundError:  # another rank or run has removed the empty parent as it ended
            tries -= 1
            if not tries:
                raise


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # folders of other ranks, nodes or runs are not empty
        for empty in _parents(folder):
            empty.rmdir()


def _parents(folder: Path) -> list[Path]:
    """The parents below MEMORY, innermost first."""
    return [parent for parent in folder.parents if MEMORY in parent.parents]


def _error_folders(run: RunDir, node: int) -> Path:
    return handover_folder(run, node).with_name(f"errors-{node:02d}")


def _run_folder(run: RunDir) -> Path:
    where = hashlib.sha256(os.fsencode(run.path.resolve())).hexdigest()[:8]
    return _user_folder() / f"{run.id}-{where}"


def _user_folder() -> Path:
    return MEMORY / f"launcher-{os.getuid()}"

"""What one attempt leaves for the next in a node's shared memory: where it lies. It ends with the run."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
from pathlib import Path

from launcher.runs.layout import RunDir

MEMORY = Path("/dev/shm")


def handover_folder(run: RunDir, node: int) -> Path:
    """Two runs of one name in different directories do not meet, nor do two nodes on one machine."""
    where = hashlib.sha256(os.fsencode(run.path.resolve())).hexdigest()[:8]
    return _of_user() / f"{run.id}-{where}" / f"node-{node:02d}"


def make_handover_folder(run: RunDir, node: int) -> Path:
    """For this user alone. Raises OSError, also when somebody else has made a folder of that name."""
    private_folder(_of_user())
    folder = handover_folder(run, node)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def private_folder(folder: Path) -> Path:
    """Made if missing. Raises OSError, also when others may enter it or somebody else has made it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a directory of this user alone")
    return folder


def remove_handover(run: RunDir, node: int) -> None:
    """That there is none is no error."""
    folder = handover_folder(run, node)
    shutil.rmtree(folder, ignore_errors=True)
    for empty in (folder.parent, folder.parent.parent):  # another node's or run's keep theirs
        with contextlib.suppress(OSError):
            empty.rmdir()


def _of_user() -> Path:
    return MEMORY / f"launcher-{os.getuid()}"

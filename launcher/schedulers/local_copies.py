"""Local copies of run directories that are on another host or on a volume.

`launcher.rundir.file_table` lists the files that are copied.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path, PurePosixPath

import platformdirs

from launcher.rundir.files import parsed
from launcher.rundir.layout import RunDir
from launcher.schedulers.base import Prepared
from launcher.schedulers.rundir import write_run
from launcher.spec.records import StateRecord


def copies_folder(place: str, runs: str) -> Path:
    """Return the local folder for copies of the run directories in the folder `runs` of another `place`."""
    where = hashlib.sha256(f"{place}:{runs}".encode()).hexdigest()[:8]
    return Path(platformdirs.user_state_dir("launcher")) / "mirrors" / f"{place}-{where}"


def private_folder(folder: Path) -> Path:
    """Create the folder if it is missing, with mode 700 regardless of the umask. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    return folder


def write_copy(prepared: Prepared, root: Path) -> RunDir:
    """Write the local copy of a run directory before it is sent. Raises OSError."""
    return write_run(replace(prepared, run_dir=str(private_folder(root) / prepared.request.run_id)))


def files_of(run: Path, patterns: Iterable[str]) -> list[str]:
    """Return the files of a run directory that match one of these patterns, sorted, without hidden ones."""
    files = (file for pattern in patterns for file in run.glob(pattern) if file.is_file())
    names = (file.relative_to(run) for file in files)
    return sorted(str(name) for name in names if not any(part.startswith(".") for part in name.parts))


def is_below(name: str) -> bool:
    """Return whether a received file name stays below the run directory."""
    parts = PurePosixPath(name).parts
    return bool(parts) and name[0] != "/" and name[-1] != "/" and ".." not in parts and "\0" not in name


def is_state(data: bytes) -> bool:
    """Return whether a received file is a valid state.json. If not, the caller keeps the previous one."""
    return StateRecord.read(parsed(data)) is not None


def keep_checkpoints(run: RunDir, names: Collection[str]) -> None:
    """Create an empty folder for each checkpoint, and delete folders whose checkpoint no longer exists."""
    for name in names:
        (run.checkpoints / name).mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):
        for entry in run.checkpoints.iterdir():
            if entry.name not in names:
                shutil.rmtree(entry, ignore_errors=True)

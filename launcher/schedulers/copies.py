"""What each copy of a run directory that is elsewhere has in common: on a host behind ssh, or on a volume.

Which files travel is in `launcher.rundir.contents`.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path, PurePosixPath

import platformdirs

from launcher.rundir.files import parsed
from launcher.rundir.forms import STATE, fits
from launcher.rundir.layout import RunDir
from launcher.schedulers.base import Prepared
from launcher.schedulers.rundir import write_run


def copies(place: str, runs: str) -> Path:
    """The folder for copies of run directories that are in the folder `runs` of another `place`."""
    where = hashlib.sha256(f"{place}:{runs}".encode()).hexdigest()[:8]
    return Path(platformdirs.user_state_dir("launcher")) / "mirrors" / f"{place}-{where}"


def for_us_alone(folder: Path) -> Path:
    """Create the folder if it is missing, for this user only, whatever the umask is. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    return folder


def write_copy(prepared: Prepared, root: Path) -> RunDir:
    """Write the copy of a run directory that is then sent. Raises OSError."""
    return write_run(replace(prepared, run_dir=str(for_us_alone(root) / prepared.request.run_id)))


def is_below(name: str) -> bool:
    """Whether a name that came from elsewhere is that of a file below a run directory."""
    parts = PurePosixPath(name).parts
    return bool(parts) and name[0] != "/" and name[-1] != "/" and ".." not in parts and "\0" not in name


def is_state(data: bytes) -> bool:
    """Whether a file that came from elsewhere is a run's state. Otherwise, what was known before is kept."""
    return fits(parsed(data), STATE)


def keep_checkpoints(run: RunDir, names: Collection[str]) -> None:
    """Copy the names of the checkpoints, as empty folders, and delete those that are not there any more."""
    for name in names:
        (run.checkpoints / name).mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):
        for entry in run.checkpoints.iterdir():
            if entry.name not in names:
                shutil.rmtree(entry, ignore_errors=True)

"""The folder of checkpoints: directories `step-00000100`, written under another name and then renamed."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

from launcher.rundir.files import read_record, replace_json

MARKER = "complete.json"
CHECKSUMS = "checksums"
"Key of the marker: whether torch.save wrote checksums, which torch.serialization.set_crc32_options decides."
CHANGED_BUFFERS = "changed_buffers"
"Key of the marker: persistent buffers that training has changed, if the job has an adapter."
BESIDE_WEIGHTS = "beside-weights"
"Folder for the files of `Task.export_files`, next to the checkpoints."
_NAME = re.compile(r"step-(\d{8,})")


class CheckpointError(Exception):
    """A checkpoint could not be written or read. Older ones are unchanged."""


class OtherShardsError(CheckpointError):
    """The checkpoint is complete, but its states cannot be resharded to the current number of shards."""


class OtherTrainingError(CheckpointError):
    """The checkpoint is complete, but this job cannot continue that training."""


class RefusedError(CheckpointError):
    """The checkpoint is damaged or contains objects that no checkpoint needs. Nothing of it is loaded."""


class PartsError(CheckpointError):
    """The hosts of the run share no folder, and one of them lacks files."""


class NotSavedError(CheckpointError):
    """The last checkpoint of an attempt could not be written; the steps since the previous one are lost."""


def directory(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def partial_path(final: Path) -> Path:
    """Return the path at which a checkpoint is written before it is renamed to `final`."""
    return final.with_name(f".{final.name}.partial")


def complete_checkpoints(folder: Path) -> dict[int, Path]:
    """Return `{step: directory}` of the checkpoints with a valid marker, in order of step."""
    checkpoints = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match is not None and read_marker(path).get("step") == int(match[1]):
            checkpoints[int(match[1])] = path
    return dict(sorted(checkpoints.items()))


def read_marker(path: Path) -> dict[str, Any]:
    """Return the content of the marker; {} if there is none."""
    return read_record(path / MARKER)


def publish(final: Path, content: dict[str, Any]) -> None:
    """Write the marker and rename the checkpoint to `final`. A directory without a marker does not count.

    Raises: OSError.
    """
    partial = partial_path(final)
    replace_json(partial / MARKER, content)
    sync(partial)
    shutil.rmtree(final, ignore_errors=True)  # an incomplete checkpoint with that name
    partial.rename(final)
    sync(final.parent)


def unreadable(checkpoint: Path, cause: object) -> str:
    """Return the message about a checkpoint of which a file cannot be read, such as one that was deleted."""
    return (
        f"{checkpoint.name} could not be read: {cause}. If that stays so, restore the file, or delete "
        f"{checkpoint} to go on from an older checkpoint"
    )


def sync(path: Path) -> None:
    """Wait until a file or a directory is on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

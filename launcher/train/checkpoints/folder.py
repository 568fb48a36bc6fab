"""The folder of checkpoints: directories `step-00000100`, written under another name and then renamed."""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

from launcher.rundir.files import read_record, replace_json

MARKER = "complete.json"
METADATA = ".metadata"
"File of torch.distributed.checkpoint: the name, the shape and the place of each tensor."
OWN_SUM, METADATA_SUM = "crc32", "metadata_crc32"
"Keys of the marker: CRC-32 of its other values and of METADATA. Earlier launchers wrote none."
CHECKSUMS = "checksums"
"Key of the marker: whether torch.save wrote checksums, which torch.serialization.set_crc32_options decides."
LABEL = "label"
"""Key of the marker: the run, attempt and step of the save. Each file of tensors and each rank's own file
ends with it and its own name. Earlier launchers wrote none."""
CHANGED_BUFFERS = "changed_buffers"
"Key of the marker: persistent buffers that training has changed, if the job has an adapter."
RESHAPED = "reshaped"
"Key of the marker: first shapes of buffers and extra states that training has given another one, by name."
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
    found = _directories(folder).items()
    return {step: path for step, path in found if read_marker(path).get("step") == step}


def _directories(folder: Path) -> dict[int, Path]:
    """Return `{step: directory}` of the directories with the name of a checkpoint, in order of step."""
    named = {
        int(match[1]): path
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := _NAME.fullmatch(path.name))
    }
    return dict(sorted(named.items()))


def read_marker(path: Path) -> dict[str, Any]:
    """Return the content of the marker; {} if there is none or it is damaged."""
    marker = read_record(path / MARKER)
    known = marker.pop(OWN_SUM, None)
    return marker if known in (None, _sum_of(marker)) else {}


def check_markers(folder: Path, newest: int) -> None:
    """Raise RefusedError if the marker of a checkpoint after step `newest` is damaged or of another step: a
    checkpoint gets its name only when its marker is on the disk."""
    for step, path in _directories(folder).items():
        if step > newest and (path / MARKER).exists() and (marker := read_marker(path)).get("step") != step:
            raise RefusedError(misplaced(path / MARKER) if marker else damaged(path / MARKER))


def check_metadata(path: Path, content: bytes) -> None:
    """Raise RefusedError if the content of METADATA differs from its checksum in the marker."""
    if read_marker(path).get(METADATA_SUM) not in (None, zlib.crc32(content)):
        raise RefusedError(damaged(path / METADATA))


def end_of_file(label: str, name: str) -> bytes:
    """Return the last bytes of the file `name` of a checkpoint. Readers of its content ignore them."""
    return f"\nlauncher {label} {name}\n".encode()


def check_label(file: Path) -> None:
    """Raise RefusedError if the file is not the one that was saved under its name in its checkpoint: the
    checksums of a file of another step or rank are right, too. Raises OSError."""
    label = read_marker(file.parent).get(LABEL)
    if label is None:
        return
    expected = end_of_file(label, file.name)
    with open(file, "rb") as stream:
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - len(expected)))
        if stream.read() != expected:
            raise RefusedError(misplaced(file))


def _sum_of(marker: dict[str, Any]) -> int:
    as_read = json.loads(json.dumps(marker))  # a key that is a number is read as text
    return zlib.crc32(json.dumps(as_read, sort_keys=True).encode())


def publish(final: Path, content: dict[str, Any]) -> None:
    """Write the marker and rename the checkpoint to `final`. A directory without a marker does not count.

    Raises: OSError.
    """
    partial = partial_path(final)
    content = {**content, METADATA_SUM: zlib.crc32((partial / METADATA).read_bytes())}
    replace_json(partial / MARKER, {**content, OWN_SUM: _sum_of(content)})
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


def damaged(file: Path, part: str | None = None) -> str:
    """Return the message about a file of a checkpoint whose bytes have changed, or about a part of it."""
    what = f"{file}" if part is None else f"{part} in {file}"
    return (
        f"{what} is damaged: restore the file from a backup, or delete {file.parent} to go on "
        "from an older checkpoint"
    )


def misplaced(file: Path) -> str:
    """Return the message about a file of a checkpoint that was not saved there."""
    return (
        f"{file} is damaged, or a file of another step, rank or run: restore the file that was saved there, "
        f"or delete {file.parent} to go on from an older checkpoint"
    )


def sync(path: Path) -> None:
    """Wait until a file or a directory is on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""The folder of checkpoints: complete directories `step-00000100`, written beside and renamed."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

from launcher.runs.files import read_json, replace_json

MARKER = "complete.json"
_NAME = re.compile(r"step-(\d{8,})")


class CheckpointError(Exception):
    """A checkpoint could not be written or read. Older ones are as they were."""


class OtherShardsError(CheckpointError):
    """It is whole, but what was saved cannot be cut into as many shards as there are now."""


class OtherTrainingError(CheckpointError):
    """It is whole, but of a training that this job cannot go on with."""


class PartsError(CheckpointError):
    """The hosts of the run share no folder, and one lacks files that others have."""


class NotSavedError(CheckpointError):
    """The last checkpoint of an attempt could not be written: the training since the one before is lost."""


def directory(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def beside(final: Path) -> Path:
    """Where a checkpoint is written before it gets its name."""
    return final.with_name(f".{final.name}.partial")


def complete_checkpoints(folder: Path) -> dict[int, Path]:
    """`{step: directory}` in order of step, of those whose marker says that everything is there."""
    found = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match is not None and read_marker(path).get("step") == int(match[1]):
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def read_marker(path: Path) -> dict[str, Any]:
    """{} when there is none."""
    return read_json(path / MARKER) or {}


def publish(final: Path, content: dict[str, Any]) -> None:
    """The marker is written last; a directory without it does not count, whatever its name.

    Raises OSError.
    """
    partial = beside(final)
    replace_json(partial / MARKER, content)
    sync_directory(partial)
    shutil.rmtree(final, ignore_errors=True)  # an incomplete one of that name
    partial.rename(final)
    sync_directory(final.parent)


def remove_all_but(folder: Path, keep: int) -> None:
    """Only the newest `keep` >= 1 complete checkpoints stay."""
    for old in list(complete_checkpoints(folder).values())[:-keep]:
        shutil.rmtree(old, ignore_errors=True)


def remove_partial(folder: Path) -> None:
    """What attempts that were killed left behind."""
    for torn in folder.glob(".step-*.partial"):
        shutil.rmtree(torn, ignore_errors=True)


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

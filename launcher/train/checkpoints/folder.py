"""The folder of checkpoints: complete directories `step-00000100`, written beside and renamed."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.rundir.files import read_record, replace_json

MARKER = "complete.json"
BESIDE_WEIGHTS = "beside-weights"
"A folder beside the checkpoints: what `Task.export_files` has written."
_NAME = re.compile(r"step-(\d{8,})")


class CheckpointError(Exception):
    """A checkpoint could not be written or read. Older ones are as they were."""


class OtherShardsError(CheckpointError):
    """It is whole, but what was saved cannot be cut into as many shards as there are now."""


class OtherTrainingError(CheckpointError):
    """It is whole, but of a training that this job cannot go on with."""


class RefusedError(CheckpointError):
    """It is damaged, or holds what no checkpoint of a training needs: nothing of it is loaded."""


class PartsError(CheckpointError):
    """The hosts of the run share no folder, and one lacks files that others have."""


class NotSavedError(CheckpointError):
    """The last checkpoint of an attempt could not be written: the training since the one before is lost."""


def directory(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def partial_path(final: Path) -> Path:
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
    return read_record(path / MARKER)


def publish(final: Path, content: dict[str, Any]) -> None:
    """The marker is written last; a directory without it does not count, whatever its name.

    Raises OSError.
    """
    partial = partial_path(final)
    replace_json(partial / MARKER, content)
    sync_directory(partial)
    shutil.rmtree(final, ignore_errors=True)  # an incomplete one of that name
    partial.rename(final)
    sync_directory(final.parent)


def remove_all_but(folder: Path, keep: int) -> None:
    """Only the newest `keep` >= 1 complete checkpoints stay, and the best where it is to be kept."""
    complete = complete_checkpoints(folder)
    for step in list(complete)[:-keep]:
        if step != best(complete):
            shutil.rmtree(complete[step], ignore_errors=True)


def best(complete: Mapping[int, Path]) -> int | None:
    """The step with the lowest held-out loss, the earliest of equals. None: no marker tells one, as without
    `train.keep_best`."""
    losses = {step: read_marker(path).get("eval_loss") for step, path in complete.items()}
    known = {step: loss for step, loss in losses.items() if isinstance(loss, float)}
    return min(known, key=known.__getitem__, default=None)


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

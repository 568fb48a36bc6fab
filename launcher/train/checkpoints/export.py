"""The weights of a checkpoint as safetensors, without process group or model, one file at a time."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from launcher.runs.files import beside
from launcher.spec.base import format_bytes
from launcher.train.checkpoints.folder import read_marker, sync_directory
from launcher.train.checkpoints.parts import PartsReader
from launcher.train.checkpoints.space import MARGIN_BYTES, free_bytes

FILE_BYTES = 5 * 10**9
"Of one file, unless a single tensor is larger. Names and index as huggingface_hub's split_torch_state_dict."
_PREFIX = "model."


class ExportError(Exception):
    """Nothing was written. The message says what to do."""


@dataclass(frozen=True)
class Weight:
    name: str
    "As in the user's model."
    shape: torch.Size
    dtype: torch.dtype
    "In the file that is written."

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def export(
    checkpoint: Path, to: Path, dtype: torch.dtype | None = None, file_bytes: int = FILE_BYTES
) -> list[Path]:
    """Write parameters and persistent buffers (of rank 0) into the new or empty directory `to`.

    `dtype`: of the floating-point ones; None leaves them as they were trained. Tied weights are written
    under each of their names. Returns the files of weights. Raises ExportError, OSError.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ExportError(f"{to} is not an empty directory; give another one")
    found = list(_weights(checkpoint, dtype))
    total = sum(weight.bytes for weight in found)
    to.parent.mkdir(parents=True, exist_ok=True)
    if (free := free_bytes(to.parent)) < total + MARGIN_BYTES:
        raise ExportError(
            f"the weights take {format_bytes(total)}, {format_bytes(free)} are free in "
            f"{to.parent.absolute()}; make room there or give another directory"
        )
    partial = beside(to, "partial")
    partial.mkdir()
    try:
        names = _write(checkpoint, found, partial, file_bytes)
        partial.replace(to)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync_directory(to.parent)
    return [to / name for name in names]


def _weights(checkpoint: Path, dtype: torch.dtype | None) -> Iterator[Weight]:
    for key, entry in FileSystemReader(checkpoint).read_metadata().state_dict_metadata.items():
        if key.startswith(_PREFIX) and isinstance(entry, TensorStorageMetadata):
            stored = entry.properties.dtype
            wanted = dtype if dtype is not None and stored.is_floating_point else stored
            yield Weight(key.removeprefix(_PREFIX), entry.size, wanted)


def in_files(weights: list[Weight], limit: int) -> list[list[Weight]]:
    """One after the other; a new file where `limit` bytes would be passed."""
    files: list[list[Weight]] = [[]]
    size = 0
    for weight in weights:
        if files[-1] and size + weight.bytes > limit:
            files.append([])
            size = 0
        files[-1].append(weight)
        size += weight.bytes
    return files


def _write(checkpoint: Path, weights: list[Weight], into: Path, file_bytes: int) -> list[str]:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    files = in_files(weights, file_bytes)
    many = len(files) > 1
    names = [
        f"model-{number:05d}-of-{len(files):05d}.safetensors" if many else "model.safetensors"
        for number in range(1, len(files) + 1)
    ]
    for name, group in zip(names, files, strict=True):
        try:
            save_file(_read(checkpoint, group), into / name, metadata={"format": "pt"})
        except SafetensorError as error:
            raise ExportError(f"{name} could not be written: {error}") from error
        # safetensors gives the file to its owner alone; whoever may enter the directory may read it.
        (into / name).chmod(into.stat().st_mode & 0o666)
        _sync_file(into / name)
    if many:
        index = {
            "metadata": {"total_size": sum(weight.bytes for weight in weights)},
            "weight_map": {
                w.name: name for name, group in zip(names, files, strict=True) for w in group
            },
        }  # fmt: skip
        (into / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return names


def _read(checkpoint: Path, weights: list[Weight]) -> dict[str, torch.Tensor]:
    """DCP puts the shards together, and converts while it copies."""
    tensors = {weight.name: torch.empty(weight.shape, dtype=weight.dtype) for weight in weights}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
        try:
            reader = PartsReader(checkpoint) if "per_node" in read_marker(checkpoint) else None
            load({"model": tensors}, checkpoint_id=checkpoint, storage_reader=reader, no_dist=True)
        except CheckpointException as error:
            causes = "; ".join(str(cause) for cause, _ in error.failures.values())
            raise ExportError(f"{checkpoint} could not be read: {causes or error}") from error
    return tensors


def _sync_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())

"""Export of a checkpoint's weights to safetensors, one file at a time, without process group or model."""

from __future__ import annotations

import json
import os
import shutil
import stat
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from launcher.rundir.files import beside, read_record
from launcher.spec.base import format_bytes
from launcher.train.checkpoints.folder import BESIDE_WEIGHTS, CheckpointError, read_marker, sync_directory
from launcher.train.checkpoints.parts import PartsReader
from launcher.train.checkpoints.reader import CheckpointPlanner, CheckpointReader, read_metadata
from launcher.train.checkpoints.space import MARGIN_BYTES, free_bytes

FILE_BYTES = 5 * 10**9
"""Maximum size of a file, unless one tensor is larger. File names and index are those of huggingface_hub's
split_torch_state_dict."""
_PREFIX = "model."


class ExportError(Exception):
    """Nothing was written. The message says what to do."""


@dataclass(frozen=True)
class Weight:
    name: str
    "Name in the user's model."
    shape: torch.Size
    dtype: torch.dtype
    "Type in the exported file."

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def export(
    checkpoint: Path, to: Path, dtype: torch.dtype | None = None, file_bytes: int = FILE_BYTES
) -> list[Path]:
    """Write parameters and rank 0's persistent buffers into the new or empty directory `to`.

    Floating-point tensors are converted to `dtype`; None keeps their type. Tied weights are written under
    each of their names. Returns the weight files.

    Raises: ExportError, OSError.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ExportError(f"{to} is not an empty directory; give another one")
    try:
        found = list(_weights(checkpoint, dtype))
    except CheckpointError as error:
        raise ExportError(str(error)) from None
    total = sum(weight.bytes for weight in found)
    to.parent.mkdir(parents=True, exist_ok=True)
    if (free := free_bytes(to.parent)) < total + MARGIN_BYTES:
        raise ExportError(
            f"the weights take {format_bytes(total)}, but {format_bytes(free)} are free in "
            f"{to.parent.absolute()}; free some space or give another directory"
        )
    partial = beside(to, "partial")
    partial.mkdir()
    try:
        names = _write(checkpoint, found, partial, file_bytes)
        _copy_files(checkpoint.parent / BESIDE_WEIGHTS, partial)
        say_dtype(partial / "config.json", found)
        partial.replace(to)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync_directory(to.parent)
    return [to / name for name in names]


def _weights(checkpoint: Path, dtype: torch.dtype | None) -> Iterator[Weight]:
    for key, entry in read_metadata(checkpoint).state_dict_metadata.items():
        if key.startswith(_PREFIX) and isinstance(entry, TensorStorageMetadata):
            stored = entry.properties.dtype
            wanted = dtype if dtype is not None and stored.is_floating_point else stored
            yield Weight(key.removeprefix(_PREFIX), entry.size, wanted)


def in_files(weights: list[Weight], limit: int) -> list[list[Weight]]:
    """Split the weights into files in their order. A file ends before it exceeds `limit` bytes."""
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
        # safetensors restricts the file to its owner; give it the permissions of the directory.
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


def _copy_files(folder: Path, to: Path) -> None:
    """Copy the files that the task wrote for the export."""
    for file in sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else ():
        if stat.S_ISREG(file.lstat().st_mode) and not (to / file.name).exists():
            shutil.copyfile(file, to / file.name)


def say_dtype(config: Path, weights: list[Weight]) -> None:
    """Set the dtype in a Hugging Face config to the type of most of the exported bytes."""
    sizes: Counter[torch.dtype] = Counter()
    for weight in weights:
        if weight.dtype.is_floating_point:
            sizes[weight.dtype] += weight.bytes
    content = read_record(config)
    if sizes and content and _set_dtype(content, str(sizes.most_common(1)[0][0]).removeprefix("torch.")):
        config.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _set_dtype(config: dict[str, Any], name: str) -> bool:
    """Set the dtype in the config and its sub-configs. Return whether any of them has such a key."""
    keys = [key for key in ("dtype", "torch_dtype") if isinstance(config.get(key), str)]
    config.update(dict.fromkeys(keys, name))
    parts = [
        part
        for key, part in config.items()
        if key.endswith("_config") and key != "quantization_config" and isinstance(part, dict)
    ]
    return any([bool(keys), *(_set_dtype(part, name) for part in parts)])


def _read(checkpoint: Path, weights: list[Weight]) -> dict[str, torch.Tensor]:
    """Read the weights. DCP assembles the shards, and converts types while it copies."""
    tensors = {weight.name: torch.empty(weight.shape, dtype=weight.dtype) for weight in weights}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
        try:
            kind = PartsReader if "per_node" in read_marker(checkpoint) else CheckpointReader
            load(
                {"model": tensors}, storage_reader=kind(checkpoint), planner=CheckpointPlanner(), no_dist=True
            )
        except CheckpointException as error:
            causes = "; ".join(str(cause) for cause, _ in error.failures.values())
            raise ExportError(f"{checkpoint} could not be read: {causes or error}") from error
    return tensors


def _sync_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())

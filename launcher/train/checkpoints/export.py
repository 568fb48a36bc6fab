"""Export of a checkpoint's weights to safetensors, one file at a time, without process group or model."""

from __future__ import annotations

import json
import shutil
import stat
import sys
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from launcher.rundir.files import read_record, temporary_name
from launcher.spec.listed_names import listed
from launcher.spec.progress import working
from launcher.spec.quantities import format_bytes
from launcher.train.adapters.adapter import CONFIG
from launcher.train.adapters.frozen import FrozenWeights
from launcher.train.checkpoints.content import AdapterAlone, Content, Merged, Weight, content_of
from launcher.train.checkpoints.disk_space import MARGIN_BYTES, free_bytes
from launcher.train.checkpoints.folder import BESIDE_WEIGHTS, CheckpointError, sync

FILE_BYTES = 5 * 10**9
"""Maximum size of a file, unless one tensor is larger. File names and index are those of huggingface_hub's
split_torch_state_dict."""
OF_A_MODEL = ("config.json", "generation_config.json")
"Files that make a directory a whole model for transformers."
OF_AN_ADAPTER = (CONFIG,)


class ExportError(Exception):
    """Nothing was written. The message says what to do."""

    @classmethod
    def reading(cls, checkpoint: Path, error: CheckpointError | None = None) -> ExportError:
        """The error of a checkpoint that could not be read, or that was removed meanwhile."""
        if error is not None and checkpoint.exists():
            return cls(str(error))
        removed = "was removed during the export, as a training does with old checkpoints"
        return cls(f"{checkpoint.name} {removed}: export a newer one")


def export(
    checkpoint: Path,
    to: Path,
    dtype: torch.dtype | None = None,
    file_bytes: int = FILE_BYTES,
    frozen: FrozenWeights | None = None,
) -> list[Path]:
    """Write the weights of a checkpoint into the new or empty directory `to`; return the weight files.

    Floating-point tensors are converted to `dtype`; None keeps their type. Tied weights are written under
    each of their names. From a training with an adapter, the adapter alone is written, in peft's format; or
    with `frozen`, the model with the adapter merged into its weights.

    Raises: ExportError, OSError.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ExportError(f"{to} is not an empty directory; give another one")
    try:
        with working("reading the checkpoint"):
            content = content_of(checkpoint, dtype, frozen)
    except CheckpointError as error:
        raise ExportError.reading(checkpoint, error) from None
    untied = content.untied if isinstance(content, Merged) else []
    if untied and not (checkpoint.parent / BESIDE_WEIGHTS / "config.json").is_file():
        raise ExportError(
            f"with the adapter, {listed(untied[0])} differ, but they are one parameter in the model, which "
            "would load only one of them: export the adapter without --merge"
        )
    alone = isinstance(content, AdapterAlone)
    total = sum(weight.bytes for weight in content.weights)
    to.parent.mkdir(parents=True, exist_ok=True)
    if (free := free_bytes(to.parent)) < total + MARGIN_BYTES:
        raise ExportError(
            f"the weights take {format_bytes(total)}, but {format_bytes(free)} are free in "
            f"{to.parent.absolute()}; free some space or give another directory"
        )
    partial = temporary_name(to, "partial")
    partial.mkdir()
    try:
        if alone:
            names = _write(content, partial, "adapter_model", sys.maxsize)  # peft reads one file
        else:
            names = _write(content, partial, "model", file_bytes)
        without = OF_A_MODEL if alone else OF_AN_ADAPTER
        _copy_files(checkpoint.parent / BESIDE_WEIGHTS, partial, without)
        say_dtype(partial / "config.json", content.weights)
        if untied:
            say_untied(partial / "config.json")
        partial.replace(to)
    except CheckpointError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ExportError.reading(checkpoint, error) from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync(to.parent)
    return [to / name for name in names]


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


def _write(content: Content, into: Path, stem: str, file_bytes: int) -> list[str]:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    files = in_files(content.weights, file_bytes)
    many = len(files) > 1
    names = [
        f"{stem}-{number:05d}-of-{len(files):05d}.safetensors" if many else f"{stem}.safetensors"
        for number in range(1, len(files) + 1)
    ]
    with working("writing the weights", sum(weight.bytes for weight in content.weights)) as advance:
        for name, group in zip(names, files, strict=True):
            try:
                save_file(content.read(group), into / name, metadata={"format": "pt"})
            except SafetensorError as error:
                raise ExportError(f"{name} could not be written: {error}") from error
            # safetensors restricts the file to its owner; give it the permissions of the directory.
            (into / name).chmod(into.stat().st_mode & 0o666)
            sync(into / name)
            advance(sum(weight.bytes for weight in group))
    if many:
        index = {
            "metadata": {"total_size": sum(weight.bytes for weight in content.weights)},
            "weight_map": {
                w.name: name for name, group in zip(names, files, strict=True) for w in group
            },
        }  # fmt: skip
        (into / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return names


def _copy_files(folder: Path, to: Path, without: Collection[str]) -> None:
    """Copy the files that the training wrote for the export, except those named in `without`."""
    for file in sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else ():
        wanted = stat.S_ISREG(file.lstat().st_mode) and file.name not in without
        if wanted and not (to / file.name).exists():
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


def say_untied(config: Path) -> None:
    """Say in a Hugging Face config that the output layer has weights of its own."""
    if content := read_record(config):
        parts = (content, *(part for part in content.values() if isinstance(part, dict)))
        for part in parts:
            if "tie_word_embeddings" in part:
                part["tie_word_embeddings"] = False
        content["tie_word_embeddings"] = False
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

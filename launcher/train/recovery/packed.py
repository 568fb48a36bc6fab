"""Tensors of one rank in one memory-mapped file, with an index that is written last: whole or not at all."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ALIGNED = 64
"Bytes; the largest element is 16."


def packed_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(_room(tensor.nbytes) for tensor in tensors)


def write_packed(path: Path, tensors: Sequence[torch.Tensor], about: dict[str, Any]) -> int:
    """Returns the bytes. `about`: values that torch.load reads with `weights_only`. Raises OSError.

    One copy, straight into the mapping: no second one in host memory, pinned or not.
    """
    data, size = path.with_suffix(".data"), packed_bytes(tensors)
    path.unlink(missing_ok=True)  # of an earlier attempt: from here on its data are overwritten
    if size:
        descriptor = os.open(data, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)  # a hole is a SIGBUS where memory is full
        finally:
            os.close(descriptor)
        for view, tensor in zip(_views(_mapped(data, size, True), _specs(tensors)), tensors, strict=True):
            view.copy_(tensor)
    partial = path.with_suffix(".partial")
    torch.save({**about, "tensors": _specs(tensors), "bytes": size}, partial)
    partial.replace(path)
    return size + path.stat().st_size


@dataclass(frozen=True)
class Packed:
    """An opened file. What is mapped stays when the names are removed."""

    about: dict[str, Any]
    tensors: tuple[torch.Tensor, ...]
    "Views of the mapping: read them only."


def read_packed(path: Path) -> Packed | None:
    """None when there is no such file. Raises OSError and what torch.load raises."""
    if not path.exists():
        return None
    about = torch.load(path, weights_only=True)
    size = about.pop("bytes")
    data = _mapped(path.with_suffix(".data"), size, False) if size else torch.empty(0, dtype=torch.uint8)
    return Packed(about, tuple(_views(data, about.pop("tensors"))))


Spec = tuple[torch.dtype, tuple[int, ...]]


def _specs(tensors: Sequence[torch.Tensor]) -> list[Spec]:
    return [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]


def _views(data: torch.Tensor, specs: Sequence[Spec]) -> list[torch.Tensor]:
    views, at = [], 0
    for dtype, shape in specs:
        size = math.prod(shape) * dtype.itemsize
        views.append(data[at : at + size].view(dtype).view(shape))
        at += _room(size)
    return views


def _mapped(path: Path, size: int, shared: bool) -> torch.Tensor:
    return torch.from_file(str(path), shared=shared, size=size, dtype=torch.uint8)


def _room(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED

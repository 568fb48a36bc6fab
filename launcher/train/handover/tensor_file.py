"""Tensors of one rank in a memory-mapped file. The index is written last, so no file is read half-written."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ALIGNED = 64
"Alignment of each tensor in bytes; the largest element has 16."


def packed_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Return the size of the data file for these tensors."""
    return sum(_aligned(tensor.nbytes) for tensor in tensors)


def write_packed(path: Path, tensors: Sequence[torch.Tensor], about: dict[str, Any]) -> int:
    """Write tensors and `about`, and return the bytes written. `about` must be loadable with `weights_only`.

    Tensors are copied straight into the mapping, without another copy in host memory, pinned or not.

    Raises: OSError.
    """
    data, size = path.with_suffix(".data"), packed_bytes(tensors)
    path.unlink(missing_ok=True)  # the index of an earlier attempt: its data are overwritten now
    if size:
        descriptor = os.open(data, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)  # writing into a hole raises SIGBUS if memory is full
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
    """An opened file. The mapping stays valid when the file is deleted."""

    about: dict[str, Any]
    tensors: tuple[torch.Tensor, ...]
    "Views of the mapping; read-only by convention."


def read_packed(path: Path) -> Packed | None:
    """Open a file; None if it does not exist. Raises OSError and the exceptions of torch.load."""
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
        at += _aligned(size)
    return views


def _mapped(path: Path, size: int, shared: bool) -> torch.Tensor:
    return torch.from_file(str(path), shared=shared, size=size, dtype=torch.uint8)


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED

"""Loading a handover under another sharding, if the files of one node contain the whole tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from launcher.train.local_shards import local, offset_of

Place = tuple[tuple[int, ...], tuple[int, ...]]
"Shape of the whole tensor, and the offset of a part in it."


def place_of(tensor: torch.Tensor) -> Place:
    """Return the place of this rank's part. A replica is the whole tensor."""
    return tuple(tensor.shape), offset_of(tensor)[1]


class Parts:
    """The parts of one tensor in a handover. A part may occur twice."""

    def __init__(self, parts: Sequence[tuple[Place, torch.Tensor]]) -> None:
        self.shape = parts[0][0][0]
        self._parts = {offset: part for (_, offset), part in parts if part.numel()}

    @property
    def complete(self) -> bool:
        return sum(part.numel() for part in self._parts.values()) == math.prod(self.shape)

    def fits(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` has the same shape and dtype."""
        return self.shape == tensor.shape and all(part.dtype == tensor.dtype for part in self._parts.values())

    def copy_into(self, tensor: torch.Tensor) -> None:
        """Copy the parts into this rank's part of `tensor`."""
        into, (_, start) = local(tensor), place_of(tensor)
        if not into.numel():
            return
        for offset, part in self._parts.items():
            target, source = [], []
            for at, size, begin, length in zip(start, into.shape, offset, part.shape, strict=True):
                low, high = max(at, begin), min(at + size, begin + length)
                target.append(slice(low - at, high - at))
                source.append(slice(low - begin, high - begin))
            if all(cut.start < cut.stop for cut in target):
                into[tuple(target)].copy_(part[tuple(source)])


def parts_of(files: Sequence[tuple[Sequence[Any], Sequence[torch.Tensor]]]) -> list[Parts]:
    """Group the parts by tensor. `files` has the places and tensors of each rank, all in the same order."""
    places, tensors = zip(*files, strict=True)
    return [
        Parts(
            [((tuple(shape), tuple(offset)), part) for (shape, offset), part in zip(at, those, strict=True)]
        )
        for at, those in zip(zip(*places, strict=True), zip(*tensors, strict=True), strict=True)
    ]

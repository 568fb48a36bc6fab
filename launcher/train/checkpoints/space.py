"""Whether a checkpoint fits on the disk, asked before it is written."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from math import prod
from pathlib import Path

from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from launcher.spec.base import format_bytes
from launcher.train.checkpoints.folder import complete_checkpoints, remove_all_but

ITEM_BYTES = 2048
"For what is around each tensor or value: 1.5 KiB of torch.save's archive, 0.3 KiB of metadata (measured)."
MARGIN_BYTES = 2**20
"Left for logs, metrics and events."


class NoSpaceError(Exception):
    """The file system has less free than the checkpoint takes."""


def bytes_of(plans: Iterable[SavePlan]) -> int:
    """Of all that these plans write."""
    return sum(_bytes(item) + ITEM_BYTES for plan in plans for item in plan.items)


def _bytes(item: WriteItem) -> int:
    """Of this rank's part alone: `item.tensor_storage_size()` is that of the whole tensor."""
    data = item.tensor_data
    return prod(data.chunk.sizes) * data.properties.dtype.itemsize if data is not None else 0


def free_bytes(folder: Path) -> int:
    """For this user, without what is reserved for root. Quotas do not show here. Raises OSError."""
    return shutil.disk_usage(folder).free


def make_room(folder: Path, needed: int, keep: int) -> None:
    """Check that `needed` bytes fit into `folder`. Raises NoSpaceError, OSError.

    When they do not, the checkpoint that the new one replaces goes first, but never the last good one.
    """
    needed += MARGIN_BYTES
    if free_bytes(folder) < needed:
        remove_all_but(folder, max(1, keep - 1))
    free = free_bytes(folder)
    if free < needed:
        kept = len(complete_checkpoints(folder))
        raise NoSpaceError(
            f"No space left on device: it takes {format_bytes(needed)}, "
            f"{format_bytes(free)} are free in {folder}; "
            f"make room there ({kept} older checkpoint(s) kept; train.keep_checkpoints is {keep})"
        )

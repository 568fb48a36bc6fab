"""Check that a checkpoint fits on the disk before it is written."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterable
from math import prod
from pathlib import Path

from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from launcher.spec.quantities import format_bytes
from launcher.train.checkpoints.folder import complete_checkpoints
from launcher.train.checkpoints.retention import remove_all_but

ITEM_BYTES = 2048
"Overhead per tensor or value: 1.5 KiB of torch.save's archive, 0.3 KiB of metadata (measured)."
MARGIN_BYTES = 2**20
"Bytes left free for logs, metrics and events."


class NoSpaceError(Exception):
    """The file system has less free space than the checkpoint takes."""


def bytes_of(plans: Iterable[SavePlan]) -> int:
    """Return the number of bytes that these plans write."""
    return sum(_bytes(item) + ITEM_BYTES for plan in plans for item in plan.items)


def _bytes(item: WriteItem) -> int:
    """Return the bytes of this rank's part; `item.tensor_storage_size()` is the size of the whole tensor."""
    data = item.tensor_data
    return prod(data.chunk.sizes) * data.properties.dtype.itemsize if data is not None else 0


def free_bytes(folder: Path) -> int:
    """Return the bytes free for this user, without the reserve for root. Ignores quotas. Raises OSError."""
    return shutil.disk_usage(folder).free


def is_full(error: BaseException) -> bool:
    """Return whether an exception says that a disk is full or a quota is used up."""
    return isinstance(error, NoSpaceError) or (
        isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    )


def make_room(folder: Path, needed: int, keep: int, *, scarce: bool) -> None:
    """Check that `needed` bytes fit into `folder`. If not, first remove the checkpoint that the new one
    replaces, but never the last complete one. `scarce`: an earlier save found no space, perhaps because of a
    quota, which `free_bytes` does not know.

    Raises: NoSpaceError, OSError.
    """
    needed += MARGIN_BYTES
    if scarce or free_bytes(folder) < needed:
        remove_all_but(folder, max(1, keep - 1))
    free = free_bytes(folder)
    if free < needed:
        kept = len(complete_checkpoints(folder))
        raise NoSpaceError(
            f"No space left on device: it takes {format_bytes(needed)}, "
            f"{format_bytes(free)} are free in {folder}; "
            f"make room there ({kept} older checkpoint(s) kept; train.keep_checkpoints is {keep})"
        )

"""Whether a checkpoint fits on the disk, asked before it is written."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from torch.distributed.checkpoint.planner import SavePlan

from launcher.spec.base import format_gib
from launcher.train.checkpoints.folder import complete_checkpoints, remove_all_but

ITEM_BYTES = 2048
"What each tensor or value takes beside its elements: torch.save's archive, 1.1 to 1.6 KiB (measured)."
MARGIN_BYTES = 2**20
"Left for logs, metrics and events."


class NoSpaceError(Exception):
    """The file system has less free than the checkpoint takes."""


def bytes_of(plans: Iterable[SavePlan]) -> int:
    """Of all tensors that these plans write, with what is around them."""
    return sum((item.tensor_storage_size() or 0) + ITEM_BYTES for plan in plans for item in plan.items)


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
            f"No space left on device: it takes {format_gib(needed)}, "
            f"{format_gib(free)} are free in {folder}; "
            f"make room there ({kept} older checkpoint(s) kept; train.keep_checkpoints is {keep})"
        )

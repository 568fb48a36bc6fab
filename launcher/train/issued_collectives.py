"""Number of collectives issued by this process, including the user's code."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

BACKGROUND_GROUP = "launcher: background"
"Description of a process group that other threads use."


def issued_so_far() -> int:
    """Return the number of collectives so far, in all groups except BACKGROUND_GROUP.

    Takes a few microseconds and waits for nothing. Point-to-point messages count only with gloo.
    """
    return sum(_issued_by(group) for group in _world.pg_map if group.group_desc != BACKGROUND_GROUP)


def _issued_by(group: dist.ProcessGroup) -> int:
    backends: set[Any] = {group._get_backend(device) for device in group._device_types}
    return sum(backend._get_sequence_number_for_group() for backend in backends)

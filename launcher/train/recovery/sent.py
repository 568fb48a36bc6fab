"""How much this process has sent, whoever called for it: what no list of expected collectives can tell."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

BESIDE = "launcher: beside the training"
"The description of a group that other threads use."


def sent() -> int:
    """Collectives so far in every group but those of BESIDE. Some microseconds; nothing is waited for.

    Messages between two ranks count with gloo only.
    """
    return sum(_sent(group) for group in _world.pg_map if group.group_desc != BESIDE)


def _sent(group: dist.ProcessGroup) -> int:
    backends: set[Any] = {group._get_backend(device) for device in group._device_types}
    return sum(backend._get_sequence_number_for_group() for backend in backends)

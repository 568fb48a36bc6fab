"""What torch computes with, apart from any model: switches of the thread that a step cut short may leave."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def kept_modes(device: torch.device) -> Iterator[None]:
    """Put back gradient mode, autocast and default type: a model may change them in a pass and back after
    it."""
    kind = device.type
    gradients, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    autocast, autocast_dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    try:
        yield
    finally:
        torch.set_grad_enabled(gradients)
        torch.set_default_dtype(dtype)
        torch.set_autocast_enabled(kind, autocast)
        torch.set_autocast_dtype(kind, autocast_dtype)

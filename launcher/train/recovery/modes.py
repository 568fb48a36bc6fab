"""Torch's thread-local modes, which a failed step may leave changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def kept_modes(device: torch.device) -> Iterator[None]:
    """Restore gradient mode, autocast and default dtype on exit: a model that fails in the middle of a pass
    may not restore them itself."""
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

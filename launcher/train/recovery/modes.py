"""Torch's thread-local modes, which a failed step may leave changed."""

from __future__ import annotations

import torch


class KeptModes:
    """Restore gradient mode, autocast and default dtype on exit: a model that fails in the middle of a pass
    may not restore them itself."""

    def __init__(self, device: torch.device) -> None:
        self._kind = device.type

    def __enter__(self) -> None:
        self._before = self._now()

    def __exit__(self, *_: object) -> None:
        if self._now() != self._before:
            gradients, dtype, autocast, autocast_dtype = self._before
            torch.set_grad_enabled(gradients)
            torch.set_default_dtype(dtype)
            torch.set_autocast_enabled(self._kind, autocast)
            torch.set_autocast_dtype(self._kind, autocast_dtype)

    def _now(self) -> tuple[bool, torch.dtype, bool, torch.dtype]:
        kind = self._kind
        return (
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            torch.is_autocast_enabled(kind),
            torch.get_autocast_dtype(kind),
        )

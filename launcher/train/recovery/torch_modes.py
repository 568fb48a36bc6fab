"""Torch's thread-local modes, which a failed step may leave changed."""

from __future__ import annotations

import torch


class KeptModes:
    """A context that restores gradient mode, autocast and default dtype on exit: a model that fails in the
    middle of a pass may not restore them itself.

    Each micro-batch enters it, so it sets only what has changed.
    """

    def __init__(self, device: torch.device) -> None:
        self._kind = device.type

    def __enter__(self) -> None:
        self._before = self._modes()

    def __exit__(self, *_: object) -> None:
        if self._modes() == self._before:
            return
        gradients, dtype, autocast, autocast_dtype = self._before
        torch.set_grad_enabled(gradients)
        torch.set_default_dtype(dtype)
        torch.set_autocast_enabled(self._kind, autocast)
        torch.set_autocast_dtype(self._kind, autocast_dtype)

    def _modes(self) -> tuple[bool, torch.dtype, bool, torch.dtype]:
        return (
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            torch.is_autocast_enabled(self._kind),
            torch.get_autocast_dtype(self._kind),
        )

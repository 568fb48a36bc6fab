"""Lets code that names a CUDA device run where there is none, on the tensors of a trace.

Tasks that were ported from a script often call `.cuda()` or pass `device="cuda"`. In a trace every tensor
stands for one on the GPU already, so the device is left out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._device import _device_constructors

from launcher.spec.errors import text_of

_FACTORIES = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")
"Methods of a tensor that make another one."


@contextmanager
def ignoring_cuda_devices() -> Iterator[None]:
    """Leave tensors where they are if code moves them to CUDA, and make them on the default device."""
    with ExitStack() as stack:

        def replace(home: Any, name: str, by: Any) -> None:
            stack.enter_context(patch.object(home, name, by))

        replace(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor)
        replace(torch.Tensor, "to", _without_first_device(torch.Tensor.to))
        replace(torch.cuda, "current_device", lambda: 0)
        replace(torch.cuda, "synchronize", lambda *_: None)
        for name in _FACTORIES:
            replace(torch.Tensor, name, _without_device(getattr(torch.Tensor, name)))
        for name in (constructor.__name__ for constructor in _device_constructors()):
            if hasattr(torch, name):
                replace(torch, name, _without_device(getattr(torch, name)))
        yield


def is_about_cuda(error: Exception) -> bool:
    """Return whether the message of an exception names CUDA or its driver, of which there is none here."""
    return any(name in text_of(error).lower() for name in ("cuda", "nvidia"))


def _without_device(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def on_default(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            del kwargs["device"]
        return function(*args, **kwargs)

    return on_default


def _without_first_device(to: Callable[..., Any]) -> Callable[..., Any]:
    """Return `Tensor.to` without a device of CUDA, which may be its first argument."""
    without = _without_device(to)

    def here(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return without(tensor, *(args[1:] if args and _is_cuda(args[0]) else args), **kwargs)

    return here


def _is_cuda(device: Any) -> bool:
    """Return whether this argument is a CUDA device: torch.device, its name or its index."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return type(device) is int or (isinstance(device, str) and device.startswith("cuda"))

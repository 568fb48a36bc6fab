"""A task's model on the meta device: its shapes, without its memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from launcher.spec.listed_names import listed
from launcher.train.task import Task, TaskError

FEW = 2**16
"Elements of a tensor that is small enough to have values."


def model_on_meta(task: Task) -> nn.Module:
    """Return the task's model on the meta device. Raises the exceptions of its model() and of `checked`.

    A model that computes with values while it is built, as in `[x.item() for x in torch.linspace(0, p, n)]`,
    is built with values in small tensors, except uninitialised ones such as the weights of torch's layers.
    """
    try:
        with torch.device("meta"):
            return checked(task, task.model())
    except Exception:
        if task.built_on_meta:
            raise
        try:
            with _SmallTensorsHaveValues():
                return _to_meta(checked(task, task.model()))
        except Exception:
            pass  # the first exception tells more
        raise


def checked(task: Task, model: Any) -> nn.Module:
    """Return what model() of the task has returned. Raises TaskError if it is no module, or has parameters
    without a shape."""
    if not isinstance(model, nn.Module):
        raise TaskError(f"model() of {type(task).__name__} returned {type(model).__name__}, not nn.Module")
    if lazy := [name for name, p in model.named_parameters() if is_lazy(p)]:
        raise TaskError(
            f"{listed(lazy)} of the model has no shape yet: call the model once on a sample in model(), or "
            "use modules that are not lazy"
        )
    return model


class _SmallTensorsHaveValues(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _device_constructors() and kwargs.get("device") is None:
            made = func(*args, **{**kwargs, "device": "meta"})
            if func is torch.empty or made.numel() > FEW:
                return made
        return func(*args, **kwargs)


def _to_meta(model: nn.Module) -> nn.Module:
    """Move parameters and buffers; torch's `to` would give each module its own copy of tied weights."""
    moved: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        homes: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for home in homes:
            for name, tensor in home.items():
                if tensor is None or tensor.is_meta:
                    continue
                if tensor not in moved:
                    there = tensor.detach().to("meta")
                    if isinstance(tensor, nn.Parameter):
                        there = nn.Parameter(there, requires_grad=tensor.requires_grad)
                    moved[tensor] = there
                home[name] = moved[tensor]
    return model

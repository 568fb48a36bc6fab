"""Find uses of parameters that sharding has replaced, which torch would silently ignore.

FSDP, tensor parallelism and quantization put another tensor in the place of a parameter, and a pipeline moves
it to another stage. Hooks on the original no longer run, and a reference to it that the task kept still has
the initial values.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from launcher.spec.listed_names import listed
from launcher.train.rank import SetupError
from launcher.train.task import TaskError

_INSTEAD = "or use sharding: ddp or zero1 without tensor and pipeline, which keep the parameters"


class Originals:
    """The parameters of a model before it is sharded."""

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (f"{prefix}.{name}" if prefix else name, module, name, weakref.ref(p), _has_hooks(p))
            for prefix, module in model.named_modules()
            for name, p in module._parameters.items()
            if p is not None
        ]

    def check(self, model: nn.Module) -> None:
        """Make each later use of a parameter that is no longer in `model` raise TaskError. Raise SetupError
        if one that was replaced had hooks."""
        hooked = []
        gone: dict[int, tuple[str, Any]] = {}
        present = {id(p) for p in model.parameters()}
        for name, module, attribute, original, had_hooks in self._places:
            # A TorchScript module keeps its parameters in an object without `get`.
            now, before = dict(module._parameters.items()).get(attribute), original()
            if had_hooks and now is not None and now is not before:
                hooked.append(name)
            if before is not None and id(before) not in present:
                gone[id(before)] = name, before
        if hooked:
            raise SetupError(
                f"{listed(hooked)} of the model had a gradient hook (register_hook or "
                "register_post_accumulate_grad_hook), which would not run: sharding replaces the parameter, "
                f"and its gradient is a part. Remove the hook, {_INSTEAD}"
            )
        for name, p in gone.values():
            if type(p) in (nn.Parameter, torch.Tensor):
                p.__class__ = Replaced
                p.reason = (
                    f"{name} of the model was used through a reference that the task or the model had kept "
                    "from before the parameter was sharded or moved to another stage. That tensor keeps the "
                    "initial values, and its gradient is lost. Read the parameter from its module at each "
                    f"use, as in module.weight, {_INSTEAD}"
                )


def _has_hooks(p: Any) -> bool:
    return bool(p._backward_hooks) or bool(getattr(p, "_post_accumulate_grad_hooks", None))


class Replaced(nn.Parameter):
    """An original parameter, or a tensor in its memory, that something other than the model refers to."""

    reason: str
    "Why it may not be used."

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        replaced = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls)]
        raise TaskError(replaced[0].reason if replaced else "a parameter was used that sharding has replaced")


_HARMLESS = {
    getattr(torch.Tensor, name).__get__
    for name in (
        "shape",
        "dtype",
        "device",
        "requires_grad",
        "ndim",
        "is_leaf",
        "layout",
        "is_meta",
        "is_nested",
        "nbytes",
    )
}
_HARMLESS |= {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.stride}
# The report of an OOM reads the storage of every live tensor.
_HARMLESS |= {torch.Tensor.element_size, torch.Tensor.untyped_storage}

"""Check that the model's own `state_dict()` holds what is trained, under the names of the model."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Container, KeysView
from typing import Any

from torch import nn

from launcher.spec.listed_names import listed
from launcher.train.task import TaskError

EXTRA = "_extra_state"
"Last part of the name under which `state_dict()` has what a module's `get_extra_state()` returns."


def state_names(model: nn.Module) -> KeysView[str]:
    """Return the names in the model's `state_dict()`.

    Raises TaskError if code of the model, such as a hook or its own `state_dict`, leaves out trained
    parameters or renames them, or if `load_state_dict` cannot be called as nn.Module's.
    """
    names: KeysView[str] = model.state_dict().keys()
    if missing := [name for name, p in left_out(model, names).items() if p.requires_grad]:
        raise TaskError(
            f"state_dict() of the model leaves out or renames {listed(missing)}: a resumed run would train "
            "it from the start again, and an export would lack it. Let state_dict() return it under its "
            "name, or set requires_grad=False"
        )
    if unknown := [name for name in names if not _has(model, name)]:
        raise TaskError(
            f"state_dict() of the model has {listed(unknown)}, but the model has nothing of this name, and "
            "checkpoints need the names of the model: keep other values in buffers or get_extra_state()"
        )
    load: Any = model.load_state_dict
    try:
        inspect.signature(load).bind(state_dict={}, strict=True, assign=False)
    except TypeError as error:
        raise TaskError(
            "load_state_dict() of the model must take the arguments state_dict, strict and assign, as that "
            f"of nn.Module does: {error}. A run could not be resumed"
        ) from None
    return names


def is_extra_state(name: str) -> bool:
    """Return whether `state_dict()` has an extra state under this name. A parameter may be called
    `my_extra_state`."""
    return name.rpartition(".")[2] == EXTRA


def left_out(model: nn.Module, names: Container[str]) -> dict[str, nn.Parameter]:
    """Return the parameters that are under none of their names in `names`, those of a `state_dict()`."""
    saved = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if name in names}
    return {name: p for name, p in model.named_parameters() if id(p) not in saved}


def _has(model: nn.Module, name: str) -> bool:
    if is_extra_state(name):
        name = name.rpartition(".")[0]
    try:
        return not name or operator.attrgetter(name)(model) is not None
    except AttributeError:
        return False

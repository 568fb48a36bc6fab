"""Lists, dictionaries and objects that an FSDP unit changes or returns.

FSDP calls a unit with copies of those that hold a tensor with a gradient. A block that appends to a list,
such as one of auxiliary losses or of skip connections, would append to the copy, and the model would go on
with the original, without an error. And FSDP gathers a unit for the backward pass when the gradient of a
tensor arrives that the unit returned: not for one that it put into such a list, or into an object.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from launcher.train.recovery.state_finder import MOST_ITEMS, sort_of


def share_arguments(unit: FSDPModule) -> None:
    """Let the callers of an FSDP unit see how it changes what they call it with.

    Call it after all other hooks of the unit are registered.
    """
    assert isinstance(unit, nn.Module)
    call = _Call(unit._get_fsdp_state())
    unit.register_forward_pre_hook(call.before_fsdp, prepend=True, with_kwargs=True)
    unit.register_forward_pre_hook(call.after_fsdp, with_kwargs=True)
    unit.register_forward_hook(call.ends, always_call=True)


class _Call:
    """The containers of the present call of a unit."""

    def __init__(self, state: Any) -> None:
        self._state = state
        self._originals: list[Any] = []
        self._containers: list[tuple[Any, Any, Any, Any]] = []
        "(original, FSDP's copy or the original, what the original holds, what the copy holds) at the start."

    def before_fsdp(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        self._originals = [*_containers((args, kwargs), set())]

    def after_fsdp(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        pairs = zip(self._originals, _containers((args, kwargs), set()), strict=True)
        self._containers = [(one, copy, _held(one), _held(copy)) for one, copy in pairs]

    def ends(self, _: nn.Module, __: Any, output: Any) -> None:
        found = []
        for original, copy, theirs, mine in self._containers:
            before = {id(value) for value in _values(mine)}
            found += [value for value in _values(copy) if id(value) not in before]
            if original is not copy:
                _apply(original, copy, theirs, mine)
        self._originals, self._containers = [], []
        if torch.is_grad_enabled():
            for container in _containers((found, output), set()):
                found += _values(container)
            self._state._register_pre_backward_hook([t for t in found if isinstance(t, torch.Tensor)])


def _apply(original: Any, copy: Any, theirs: Any, mine: Any) -> None:
    """Change the original as the copy was changed since they held `theirs` and `mine`."""
    if isinstance(copy, dict):
        for key in mine.keys() - copy.keys():
            del original[key]
        for key, value in copy.items():
            if key not in mine or mine[key] is not value:
                original[key] = value
    elif len(copy) != len(mine) or any(a is not b for a, b in zip(copy, mine, strict=True)):
        # What the unit has left is what the caller had: the copies have views of those tensors.
        before = {id(a): b for a, b in zip(mine, theirs, strict=True)}
        original[:] = [before.get(id(value), value) for value in copy]


def _containers(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the lists and dictionaries in a value, and the attributes of dataclasses and of objects of the
    user's classes. `seen`: the ids of such objects, the only ones that FSDP does not copy."""
    inside: Any = ()
    if isinstance(value, (list, dict)):
        yield value
        inside = list(_values(value))
    elif isinstance(value, tuple):
        inside = value
    elif isinstance(value, type) or not hasattr(value, "__dict__"):
        return
    elif dataclasses.is_dataclass(value):
        yield vars(value)
        inside = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif sort_of(value) == "object" and id(value) not in seen and len(seen) < MOST_ITEMS:
        seen.add(id(value))
        yield vars(value)
        inside = list(vars(value).values())
    for one in inside:
        yield from _containers(one, seen)


def _held(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


def _values(container: Any) -> Any:
    return container.values() if isinstance(container, dict) else container

"""Lists, dictionaries and objects that an FSDP unit changes or returns.

FSDP calls a unit with copies of the containers that hold a tensor with a gradient. A block that appends to a
list, such as one of auxiliary losses or of skip connections, would append to the copy, and the model would
silently continue with the original. FSDP gathers a unit for the backward pass when a gradient arrives for a
tensor that the unit returned, but not for a tensor that the unit put into such a list or into an object.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from launcher.train.activations.mutable_containers import entries_of
from launcher.train.undo.objects import MOST_ITEMS, attributes_of, sort_of


def share_arguments(unit: FSDPModule) -> None:
    """Let the callers of an FSDP unit see how it changes its arguments.

    Call it after all other hooks of the unit are registered.
    """
    assert isinstance(unit, nn.Module)
    call = _Call(unit._get_fsdp_state())
    # Directly before and after FSDP's hook, which is the first one: others may add arguments.
    hooks: Any = unit._forward_pre_hooks
    of_fsdp = next(iter(hooks))
    unit.register_forward_pre_hook(call.after_fsdp, prepend=True, with_kwargs=True)
    hooks.move_to_end(of_fsdp, last=False)
    unit.register_forward_pre_hook(call.before_fsdp, prepend=True, with_kwargs=True)
    unit.register_forward_hook(call.ends, always_call=True)


class _Call:
    """The containers of the current call of a unit."""

    def __init__(self, state: Any) -> None:
        self._state = state
        self._originals: list[Any] = []
        self._containers: list[tuple[Any, Any, Any, Any]] = []
        """(original, FSDP's copy or the original, entries of the original, entries of the copy) before the
        call."""

    def before_fsdp(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        self._originals = _changeable((args, kwargs))

    def after_fsdp(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        pairs = zip(self._originals, _changeable((args, kwargs)), strict=True)
        self._containers = [
            (original, copy, entries_of(original), entries_of(copy)) for original, copy in pairs
        ]

    def ends(self, _: nn.Module, __: Any, output: Any) -> None:
        """Change the originals as the unit has changed the copies. Let FSDP gather the unit when a gradient
        arrives for a tensor that the unit put into them, or into an object that it returns."""
        added = []
        for original, copy, original_entries, copy_entries in self._containers:
            before = {id(value) for value in _values(copy_entries)}
            added += [value for value in _values(copy) if id(value) not in before]
            if original is not copy:
                _apply(original, copy, original_entries, copy_entries)
        self._originals, self._containers = [], []
        if torch.is_grad_enabled():
            known = set(map(id, tree_leaves(output)))  # FSDP handles these itself
            containers = _containers((added, output), set())
            values = (value for container in containers for value in _values(container))
            new = [value for value in values if isinstance(value, torch.Tensor) and id(value) not in known]
            self._state._register_pre_backward_hook(new)


def _apply(original: Any, copy: Any, original_entries: Any, copy_entries: Any) -> None:
    """Change the original as the copy has changed since they held `original_entries` and `copy_entries`."""
    if isinstance(copy, Mapping):
        for key in copy_entries.keys() - copy.keys():
            original.pop(key, None)
        for key, value in copy.items():
            if key not in copy_entries or copy_entries[key] is not value:
                original[key] = value
    elif len(copy) != len(copy_entries) or any(a is not b for a, b in zip(copy, copy_entries, strict=True)):
        # Keep the caller's tensors for entries that the unit left: the copies have views of them.
        before = {id(a): b for a, b in zip(copy_entries, original_entries, strict=True)}
        now = [before.get(id(value), value) for value in copy]
        original.clear()
        original.extend(now)


def _changeable(value: Any) -> list[Any]:
    """Return the containers in a value, without those that cannot change."""
    return [
        container for container in _containers(value, set()) if not isinstance(container, (tuple, frozenset))
    ]


def _containers(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the lists, tuples, dictionaries and attributes of objects in a value. `seen`: the ids of objects,
    which FSDP does not copy."""
    sort = sort_of(value, passed_on=True)
    if sort not in ("dict", "items", "tuple", "object"):
        return
    if sort == "object":
        if id(value) in seen or len(seen) == MOST_ITEMS:
            return
        seen.add(id(value))
    for container in [*attributes_of(value, passed_on=True), *([value] if sort != "object" else [])]:
        yield container
        for entry in list(_values(container)):
            yield from _containers(entry, seen)


def _values(container: Any) -> Any:
    return container.values() if isinstance(container, Mapping) else container

"""Containers and attributes whose entries a block may change, and their earlier entries."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

_ABSENT = object()


class Place:
    """A dictionary, list, set or deque, and a copy of its entries. The attributes of an object are a
    dictionary.

    `hold` returns the tensor to keep in place of each tensor in it.
    """

    def __init__(
        self, name: str, container: Any, hold: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> None:
        self.name, self.container, self._held = name, container, entries_of(container)
        if hold is not None:
            _map_tensors(self._held, hold)

    def changed(self) -> list[str]:
        """Return the names of changed entries, except tensors with a graph: these belong to one pass."""
        held, now = dict(items_of(self._held)), dict(items_of(entries_of(self.container)))
        keys = [key for key in {**held, **now} if held.get(key, _ABSENT) is not now.get(key, _ABSENT)]
        return [f"{self.name}{key}" for key in keys if not _has_graph(now.get(key))]

    def restore(self, tensors: Mapping[int, torch.Tensor]) -> Place | None:
        """Restore the earlier entries, with `tensors` in place of tensors with the same id. Return the
        entries that were replaced, or None if nothing differed."""
        held = self._held
        if tensors:
            held = held.copy()
            _map_tensors(held, lambda t: tensors.get(id(t), t))
        if _same(held, self.container):
            return None
        now = Place(self.name, self.container)
        _fill(self.container, held)
        return now


def entries_of(container: Any) -> Any:
    """Return a copy of a mapping as a dictionary, of anything else as a list."""
    return dict(container) if isinstance(container, (dict, Mapping)) else list(container)


def items_of(entries: Any) -> list[tuple[Any, Any]]:
    return list(entries.items() if isinstance(entries, Mapping) else enumerate(entries))


def _same(entries: Any, container: Any) -> bool:
    """Return whether a container has these entries, in this order."""
    if len(entries) != len(container):
        return False
    if isinstance(entries, dict):
        return all(map(operator.eq, entries, container)) and all(
            map(operator.is_, entries.values(), container.values())
        )
    return all(map(operator.is_, entries, container))


def _fill(container: Any, entries: Any) -> None:
    container.clear()
    if isinstance(entries, dict):
        for key, value in entries.items():  # classes such as transformers' ModelOutput forbid `update`
            container[key] = value
    else:
        (container.update if isinstance(container, set) else container.extend)(entries)


def _map_tensors(entries: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace each tensor by a function of it, also inside tuples, which have no `Place` of their own."""
    for key, value in items_of(entries):
        if isinstance(value, (torch.Tensor, tuple)):
            entries[key] = _in_tuples(value, function)


def _in_tuples(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if not isinstance(value, tuple):
        return value
    inside = [_in_tuples(item, function) for item in value]
    if all(map(operator.is_, inside, value)):
        return value
    cls: Any = type(value)
    return cls._make(inside) if hasattr(value, "_fields") else cls(inside)


def _has_graph(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(_has_graph, value))
    return isinstance(value, torch.Tensor) and not value.is_leaf

"""Containers and attributes whose entries a block may change, and what they held before."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

_ABSENT = object()


class Place:
    """A dictionary, list, set or deque, and what it holds now. The attributes of an object are a dictionary.

    `hold` returns what to keep of a tensor.
    """

    def __init__(
        self, name: str, home: Any, hold: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> None:
        self.name, self.home, self._held = name, home, entries_of(home)
        if hold is not None:
            _map_tensors(self._held, hold)

    def changed(self) -> list[str]:
        """Return the names of what differs, without tensors with a graph, which belong to one pass."""
        held, now = dict(items_of(self._held)), dict(items_of(entries_of(self.home)))
        keys = [key for key in {**held, **now} if held.get(key, _ABSENT) is not now.get(key, _ABSENT)]
        return [f"{self.name}{key}" for key in keys if not _has_graph(now.get(key))]

    def restore(self, tensors: Mapping[int, torch.Tensor]) -> Place | None:
        """Restore what it held, with `tensors` (by id) in place of tensors. Return what it holds now; None if
        nothing differs."""
        held = self._held
        if tensors:
            held = held.copy()
            _map_tensors(held, lambda t: tensors.get(id(t), t))
        if _same(held, self.home):
            return None
        now = Place(self.name, self.home)
        _fill(self.home, held)
        return now


def entries_of(home: Any) -> Any:
    """Return a copy of a mapping as a dictionary, of anything else as a list."""
    return dict(home) if isinstance(home, (dict, Mapping)) else list(home)


def items_of(entries: Any) -> list[tuple[Any, Any]]:
    return list(entries.items() if isinstance(entries, Mapping) else enumerate(entries))


def _same(entries: Any, home: Any) -> bool:
    """Return whether a container has these entries, in this order."""
    if len(entries) != len(home):
        return False
    if isinstance(entries, dict):
        return all(map(operator.eq, entries, home)) and all(
            map(operator.is_, entries.values(), home.values())
        )
    return all(map(operator.is_, entries, home))


def _fill(home: Any, entries: Any) -> None:
    home.clear()
    if isinstance(entries, dict):
        for key, value in entries.items():  # classes such as transformers' ModelOutput forbid `update`
            home[key] = value
    else:
        (home.update if isinstance(home, set) else home.extend)(entries)


def _map_tensors(entries: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace each tensor by a function of it, also those in tuples, which cannot be a place."""
    for key, value in items_of(entries):
        if isinstance(value, (torch.Tensor, tuple)):
            entries[key] = _in_tuples(value, function)


def _in_tuples(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if not isinstance(value, tuple):
        return value
    inside = [_in_tuples(one, function) for one in value]
    if all(map(operator.is_, inside, value)):
        return value
    kind: Any = type(value)
    return kind._make(inside) if hasattr(value, "_fields") else kind(inside)


def _has_graph(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(_has_graph, value))
    return isinstance(value, torch.Tensor) and not value.is_leaf

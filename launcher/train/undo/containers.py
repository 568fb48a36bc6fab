"""Check whether lists, dictionaries and the attributes of objects still hold the same objects."""

from __future__ import annotations

import operator
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from types import MappingProxyType
from typing import Any

_FOLLOWED = {cls.values for cls in (dict, OrderedDict, MappingProxyType, Mapping)}
"Methods that return a view, which follows the changes of its dictionary."
_FALSE_IF_EMPTY = (dict, OrderedDict, list, set, deque)


class _Values(Collection[Any]):
    """The values of a dictionary whose class overrides `values`, which may then return a list or a
    generator."""

    def __init__(self, container: Any) -> None:
        self._container = container

    def __len__(self) -> int:
        return len(self._container)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._container.values())

    def __contains__(self, value: object) -> bool:
        return value in self._container.values()


class Without(Collection[Any]):
    """The keys and values of a dictionary, without some keys."""

    def __init__(self, container: Mapping[Any, Any], keys: frozenset[Any]) -> None:
        self._container, self._without = container, keys

    def __len__(self) -> int:
        return 2 * (len(self._container) - sum(key in self._container for key in self._without))

    def __iter__(self) -> Iterator[Any]:
        items = ((key, value) for key, value in self._container.items() if key not in self._without)
        return chain.from_iterable(items)

    def __contains__(self, value: object) -> bool:
        return any(value is each for each in self)


class Containers:
    """Containers, and the objects that they held when they were added.

    A comparison takes two microseconds for a hundred objects, so each step can afford it.
    """

    def __init__(self) -> None:
        self._empty: list[Collection[Any]] = []
        "Containers that were empty: modules have many, and this is the quickest check."
        self._views: list[Collection[Any]] = []
        "The containers, and for a dictionary also a view of its values."
        self._sizes: list[int] = []
        self._held: list[Any] = []
        "Keeps the objects alive, so that a new object is never mistaken for one of them."
        self._owners: list[dict[str, Any]] = []
        "The dictionary of each single entry."
        self._owner_sizes: list[int] = []
        self._keys: list[str] = []
        self._entries: list[Any] = []

    def add(self, container: Any) -> None:
        """Add a dictionary, a list, a set, a deque or a view of one of them."""
        if type(container) in _FALSE_IF_EMPTY and not container:
            self._empty.append(container)
            return
        views: list[Any] = [container]
        if isinstance(container, Mapping):
            has_own_values = type(container).values not in _FOLLOWED
            views.append(_Values(container) if has_own_values else container.values())
        elif hasattr(container, "values"):  # of a TorchScript module, whose names never change
            views = [_Values(container)]
        self._views += views
        self._sizes += map(len, views)
        self._held += chain.from_iterable(views)

    def add_entries(self, container: dict[str, Any], keys: Iterable[str]) -> None:
        """Add these entries of a dictionary, and its size: its other entries may be replaced."""
        for key in (*keys, ""):
            self._owners.append(container)
            self._owner_sizes.append(len(container))
            self._keys.append(key)
            self._entries.append(container.get(key))

    def clear(self) -> None:
        """Forget the containers and the objects."""
        for kept in vars(self).values():
            kept.clear()

    def hold_the_same(self) -> bool:
        """Return whether each container still holds the same objects in the same order. A number that was
        replaced by an equal one may count as another object."""
        now: Iterator[Any] = chain.from_iterable(self._views)
        return (
            not any(self._empty)
            and [*map(len, self._views)] == self._sizes
            and [*map(len, self._owners)] == self._owner_sizes
            and all(map(operator.is_, now, self._held))
            and all(map(operator.is_, map(dict.get, self._owners, self._keys), self._entries))
        )

"""Whether lists, dictionaries and the attributes of objects still hold what they held before."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from types import MappingProxyType
from typing import Any

_FOLLOWED = {kind.values for kind in (dict, OrderedDict, MappingProxyType, Mapping)}
"Methods that return a view, which follows the changes of its dictionary."


class _Values(Collection[Any]):
    """The values of a dictionary whose class has a `values` of its own, which may return a list or a
    generator."""

    def __init__(self, home: Any) -> None:
        self._home = home

    def __len__(self) -> int:
        return len(self._home)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._home.values())

    def __contains__(self, value: object) -> bool:
        return value in self._home.values()


class Containers:
    """Containers, and the objects that they held when they were added.

    A comparison takes two microseconds for a hundred objects, so each step can afford it.
    """

    def __init__(self) -> None:
        self._views: list[Collection[Any]] = []
        "The containers, and of a dictionary also its values, which follow its changes."
        self._sizes: list[int] = []
        self._held: list[Any] = []
        "Keeps the objects alive, so that a new object is never taken for one of them."

    def add(self, container: Any) -> None:
        """Add a dictionary, a list, a set or a deque."""
        views: list[Any] = [container]
        if isinstance(container, Mapping):
            own = type(container).values not in _FOLLOWED
            views.append(_Values(container) if own else container.values())
        elif hasattr(container, "values"):  # of a TorchScript module, whose names never change
            views = [_Values(container)]
        self._views += views
        self._sizes += map(len, views)
        self._held += chain.from_iterable(views)

    def clear(self) -> None:
        """Forget the containers and the objects."""
        for kept in (self._views, self._sizes, self._held):
            kept.clear()

    def hold_the_same(self) -> bool:
        """Return whether each container still holds the same objects in the same order. A number that was
        replaced by an equal one may count as another object."""
        now: Iterator[Any] = chain.from_iterable(self._views)
        return [*map(len, self._views)] == self._sizes and all(map(operator.is_, now, self._held))

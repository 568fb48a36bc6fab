"""What is kept of a container, an object or a generator, and how it is restored."""

from __future__ import annotations

import copy
import itertools
import operator
import random
import re
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from launcher.train.rng import numpy
from launcher.train.undo.objects import MOST_DATA, NUMBERS, SMALL, is_activation, is_state, sort_of

HOOKS_OF_TENSOR = ("_backward_hooks", "_post_accumulate_grad_hooks")
_FILLED = (dict, OrderedDict, defaultdict, list, deque)
"Containers of activations that are filled again. Other classes may refuse it, as transformers' ModelOutput."
_OF_DYNAMO = re.compile(r"__|.*_\d+_c\d+")
"New globals of a module in which torch.compile keeps its code and what this reads (torch 2.13)."
_NONE = object()


class Detached:
    """A tensor with an autograd graph, or a container of such tensors, detached, because the graph would keep
    the memory of its pass alive. Small tensors are copied. Those too large to be state are left out."""

    def __init__(self, value: Any) -> None:
        self.value = tree_map_only(torch.Tensor, _detached, value)
        self._ids = {id(one): id(before) for one, before in _containers(self.value, value)}
        "Id of a container in `value` -> id of the one that it is a copy of, which nothing here keeps alive."

    def restored(self, now: Any) -> Any:
        """Return the value to put in place of `now`. Containers that are still in `now` are filled again,
        because a closure may hold them."""
        present = {id(one): one for one, _ in _containers(now, now)}
        return self._filled(self.value, present)

    def _filled(self, value: Any, present: Mapping[int, Any]) -> Any:
        if isinstance(value, tuple):
            within = [self._filled(one, present) for one in value]
            unchanged = all(map(operator.is_, value, within))
            return value if unchanged else getattr(value, "_make", type(value))(within)
        if type(value) not in _FILLED:
            return value
        container: Any = present.get(self._ids.get(id(value), 0))
        if type(container) is not type(value):
            container = copy.copy(value)  # the next pass may change it
        if isinstance(value, dict):
            inside = {key: self._filled(one, present) for key, one in value.items()}
            container.clear()
            container.update(inside)
        else:
            elements = [self._filled(one, present) for one in value]
            container.clear()
            container.extend(elements)
        return container


def _containers(value: Any, like: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container of `_FILLED` in `value` with the one in its place in `like`, which has the
    same structure."""
    if type(value) is not type(like) or not (type(value) in _FILLED or isinstance(value, tuple)):
        return
    if not isinstance(value, tuple):
        yield value, like
    pairs = (
        zip(value.values(), like.values(), strict=True)
        if isinstance(value, dict)
        else zip(value, like, strict=True)
    )
    for one, other in pairs:
        yield from _containers(one, other)


def _detached(tensor: torch.Tensor) -> torch.Tensor | None:
    if tensor.is_leaf:
        return tensor
    if tensor.nbytes <= SMALL:
        return tensor.detach().clone()  # code may write it in place
    return tensor.detach() if tensor.nbytes <= MOST_DATA else None


class Entries:
    """The entries of a dictionary, or the attributes of an object."""

    def __init__(
        self, name: str, container: MutableMapping[Any, Any], ignored: frozenset[str] = frozenset()
    ) -> None:
        self.name, self.container, self.ignored = name, container, ignored
        self.kept: dict[Any, Any] = {
            key: Detached(value) if is_activation(value) else value
            for key, value in container.items()
            if key not in ignored
        }

    def _changed(self) -> list[Any]:
        now = [key for key in self.container if key not in self.ignored]
        keys = [key for key in now if not _same(self.kept.get(key, _NONE), self.container[key])]
        return keys + [key for key in self.kept if key not in self.container]

    def changed(self, *, numbers: bool = False) -> list[str]:
        """Return the names of tensors, arrays and generators that have changed; with `numbers` also of
        numbers."""
        changed = (key for key in self._changed() if is_state(self.container.get(key), numbers))
        return [f"{self.name}{text_of(key)}" for key in changed]

    def restore(self) -> None:
        """Restore the content and its order."""
        now = [key for key in self.container if key not in self.ignored]
        in_order = len(now) == len(self.kept) and all(map(operator.is_, now, self.kept))
        if in_order and not self._changed():
            return
        of_globals = "__builtins__" in self.kept
        for key in [key for key in now if key not in self.kept]:
            if not (of_globals and _OF_DYNAMO.match(key)):
                del self.container[key]
        for key in self.kept:
            self._restore(key)
        if isinstance(self.container, dict) and self.name.endswith(".") and not self.ignored:
            for key in self.kept:  # restores their order
                if key in self.container:
                    self.container[key] = self.container.pop(key)

    def restore_state(self) -> None:
        """Restore only entries that held tensors or arrays, directly or in a tuple, list or dictionary.
        Numbers keep their new values."""
        for key, value in self.kept.items():
            if is_state(value.value if isinstance(value, Detached) else value):
                self._restore(key)

    def _restore(self, key: Any) -> None:
        value, now = self.kept[key], self.container.get(key, _NONE)
        if isinstance(value, Detached):
            value = value.restored(now)
        if value is not now:
            self.container[key] = value


def text_of(key: Any) -> Any:
    """Return the key, or a word in place of a tensor, whose text would be its content."""
    return "parameter" if isinstance(key, torch.Tensor) else key


class Items:
    """The elements of a list, a set or a deque."""

    def __init__(self, name: str, container: Any) -> None:
        self.name, self.container, self._kept = name, container, list(container)

    def _has_changed(self) -> bool:
        now = list(self.container)
        return len(now) != len(self._kept) or not all(map(_same, self._kept, now))

    def changed(self, *, numbers: bool = False) -> list[str]:
        counts = any(is_state(one, numbers) for one in self.container)
        return [self.name] if counts and self._has_changed() else []

    def restore(self) -> None:
        if self._has_changed():
            self.container.clear()
            (self.container.update if isinstance(self.container, set) else self.container.extend)(self._kept)

    def restore_state(self) -> None:
        if any(map(is_state, self._kept)):
            self.restore()


class Empty:
    """Dictionaries of hooks and submodules that were empty: modules have many."""

    def __init__(self) -> None:
        self.name, self.kept = "empty", list[dict[Any, Any]]()

    def changed(self, *, numbers: bool = False) -> list[str]:
        return []

    def restore(self) -> None:
        for container in filter(None, self.kept):
            container.clear()

    def restore_state(self) -> None:
        """They held no state."""


class State:
    """The state of a random number generator, or the content of a small numpy array or byte array."""

    def __init__(
        self,
        name: str,
        get: Callable[[], Any],
        set_state: Callable[[Any], object],
        equal: Callable[[Any, Any], bool] | None = None,
    ) -> None:
        """`equal`: compares two results of `get`."""
        self.name, self._get, self._set_state, self._equal = name, get, set_state, equal or _equal
        self._kept = get()

    def refreshed(self) -> State:
        """Return a new copy of the content."""
        return State(self.name, self._get, self._set_state, self._equal)

    def changed(self, *, numbers: bool = False) -> list[str]:
        return [] if self._equal(self._get(), self._kept) else [self.name]

    def restore(self) -> None:
        if self.changed():
            self._set_state(self._kept)


@dataclass
class Switches:
    """One attribute of many modules or tensors, such as `training`."""

    name: str
    owners: list[Any] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    of_model: int = 0
    "Number of `owners` that are the model's; they come first."

    def add(self, owner: Any) -> Any:
        """Keep the attribute's value, and return it."""
        self.owners.append(owner)
        self.values.append(getattr(owner, self.name))
        return self.values[-1]

    def refreshed(self) -> Switches:
        """Return the switches as they are now."""
        return replace(self, values=[*map(operator.attrgetter(self.name), self.owners)])

    def restore(self) -> None:
        self._restore(len(self.owners))

    def restore_state(self) -> None:
        """Restore what is the model's, and gradients."""
        self._restore(len(self.owners) if self.name == "grad" else self.of_model)

    def _restore(self, count: int) -> None:
        for owner, value in itertools.islice(zip(self.owners, self.values, strict=True), count):
            if getattr(owner, self.name) is not value:
                if self.name == "requires_grad" and not owner.is_leaf:
                    owner.detach_()  # the failed pass has written it, and its graph would stay
                setattr(owner, self.name, value)


class Gathered:
    """The hooks of the parameter that FSDP2 gathers from the shards, which does not exist before the first
    pass."""

    def __init__(self, parameter: Any) -> None:
        """`parameter`: torch.distributed.fsdp's FSDPParam."""
        self._parameter = parameter

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(self._parameter, "_unsharded_param", None), name, None)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in HOOKS_OF_TENSOR:
            setattr(self._parameter._unsharded_param, name, value)
        else:
            super().__setattr__(name, value)


def state_of(name: str, value: Any) -> State | None:
    """Return the state of a generator, a small numpy array or a small byte array; None for other objects."""
    sort = sort_of(value)
    if sort == "array" and value.nbytes <= SMALL and value.dtype != object and value.flags.writeable:
        return State(name, value.copy, partial(_fill, value))
    if sort == "bytes" and len(value) <= SMALL:
        return State(name, partial(copy.copy, value), partial(_fill_bytes, value))
    return _generator_state(name, value) if sort == "generator" else None


def _generator_state(name: str, value: Any) -> State:
    if isinstance(value, random.Random):
        return State(name, value.getstate, value.setstate)
    if hasattr(value, "bit_generator"):  # numpy's Generator
        bits = value.bit_generator
        return State(name, lambda: bits.state, lambda state: setattr(bits, "state", state))
    return State(name, value.get_state, value.set_state)


def _fill(array: Any, values: Any) -> None:
    array[...] = values


def _fill_bytes(container: Any, kept: Any) -> None:
    container[:] = kept


def _same(kept: Any, now: Any) -> bool:
    """Return whether both are the same object, or equal numbers or strings."""
    if kept is now:
        return True
    return type(kept) is type(now) and type(kept) in NUMBERS and bool(kept == now)


def _equal(one: Any, other: Any) -> bool:
    """Compare states of generators and arrays, whose parts may be tensors and arrays."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if numpy is not None and isinstance(one, numpy.ndarray):
        return bool(
            one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)

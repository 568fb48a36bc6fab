"""Find the state of a task and its model besides trained parameters, through their attributes.

A model may keep state in buffers, in attributes (a tensor, a counter), in its own random number generator, or
in a list of the task. `StateFinder` finds the state that can be copied and restored.
"""

from __future__ import annotations

import argparse
import array
import builtins
import copy
import itertools
import operator
import random
import re
import sys
import sysconfig
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from numbers import Number
from pathlib import Path
from types import (
    BuiltinFunctionType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only

from launcher.train.pipeline_parts import CHUNKS
from launcher.train.replaced import Replaced
from launcher.train.rng import numpy
from launcher.train.shards import parameter_groups
from launcher.train.task import Task
from launcher.train.undo.containers import Containers, Without

MOST_ITEMS = 1000
"A longer list, dictionary or set counts as data; its elements are not searched."
MOST_OBJECTS = 50_000
"Maximum number of objects that one search visits."
SMALL = 2**20
"Maximum bytes of a tensor or array that is copied at each step."
MOST_DATA = 64 * 2**20
"Maximum bytes of a tensor of the task or its data that is copied before its first change."

INTERNAL = frozenset({*vars(nn.Module()), CHUNKS})
"Attributes that every torch module has, or that launcher sets."
CHANGED_FOR_A_PASS = (
    "_modules",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
"Those of them that code may change for a part of a pass, which does not reach its end if memory runs out."
HOOKS_OF_TENSOR = ("_backward_hooks", "_post_accumulate_grad_hooks")
SEARCHED = ("grad", *HOOKS_OF_TENSOR)
"Attributes of tensors that hold what a search visits."
_BASES = ("torch", "builtins", "abc", "typing", "collections")
_LIBRARIES = tuple({f"{Path(sysconfig.get_path(name))}/" for name in ("stdlib", "purelib", "platlib")})
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
            key: Detached(value) if _is_activation(value) else value
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
        changed = (key for key in self._changed() if _is_state(self.container.get(key), numbers))
        return [f"{self.name}{_text_of(key)}" for key in changed]

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
            if _is_state(value.value if isinstance(value, Detached) else value):
                self._restore(key)

    def _restore(self, key: Any) -> None:
        value, now = self.kept[key], self.container.get(key, _NONE)
        if isinstance(value, Detached):
            value = value.restored(now)
        if value is not now:
            self.container[key] = value


def _text_of(key: Any) -> Any:
    """Return the key, or a word in place of a tensor, whose text would be its content."""
    return "parameter" if isinstance(key, torch.Tensor) else key


class Slotted(MutableMapping[str, Any]):
    """The attributes of an object with `__slots__`, the class attributes of a user's class, some attributes
    of a module of torch, or the buffers of a TorchScript module, which torch keeps in an object that is not a
    mapping."""

    def __init__(self, owner: Any, names: Callable[[], Iterable[str]]) -> None:
        self.owner, self._names = owner, names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(list(self._names()))

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self.owner, name)
        except AttributeError:
            raise KeyError(name) from None

    # An instance may be frozen, such as a frozen dataclass.
    def __setitem__(self, name: str, value: Any) -> None:
        own = isinstance(self.owner, type | nn.Module)
        (setattr if own else object.__setattr__)(self.owner, name, value)

    def __delitem__(self, name: str) -> None:
        (delattr if isinstance(self.owner, type) else object.__delattr__)(self.owner, name)


class Items:
    """The elements of a list, a set or a deque."""

    def __init__(self, name: str, container: Any) -> None:
        self.name, self.container, self._kept = name, container, list(container)

    def _has_changed(self) -> bool:
        now = list(self.container)
        return len(now) != len(self._kept) or not all(map(_same, self._kept, now))

    def changed(self, *, numbers: bool = False) -> list[str]:
        counts = any(_is_state(one, numbers) for one in self.container)
        return [self.name] if counts and self._has_changed() else []

    def restore(self) -> None:
        if self._has_changed():
            self.container.clear()
            (self.container.update if isinstance(self.container, set) else self.container.extend)(self._kept)

    def restore_state(self) -> None:
        if any(map(_is_state, self._kept)):
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


def _same(kept: Any, now: Any) -> bool:
    """Return whether both are the same object, or equal numbers or strings."""
    if kept is now:
        return True
    return type(kept) is type(now) and type(kept) in _NUMBERS and bool(kept == now)


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


class Search:
    """The objects that a search has visited, and the containers that it has read."""

    def __init__(self) -> None:
        self._objects: list[Any] = []
        "Keeps the objects alive, so that no id is reused."
        self._kinds: list[type] = []
        self._containers = Containers()
        self._large: list[Any] = []
        self._activations = False

    def visits(self, value: Any) -> None:
        if not self._activations:
            self._objects.append(value)
            self._kinds.append(type(value))

    def reads(self, container: Any) -> None:
        if not self._activations:
            self._containers.add(container)

    def reads_entries(self, container: dict[str, Any], keys: Iterable[str]) -> None:
        if not self._activations:
            self._containers.add_entries(container, keys)

    def skips(self, large: Any) -> None:
        """Record a container that is too large to be searched."""
        self._large.append(large)

    def meets_activation(self) -> None:
        """Record that there is a tensor with a graph, or a container of such tensors. These differ from pass
        to pass, and nothing may keep them alive."""
        self._activations = True
        for kept in (self._objects, self._kinds, self._large):
            kept.clear()
        self._containers.clear()

    def is_current(self) -> bool:
        """Return whether a search would visit the same objects again."""
        return (
            not self._activations
            and [*map(type, self._objects)] == self._kinds
            and all(len(large) > MOST_ITEMS for large in self._large)
            and self._containers.hold_the_same()
        )


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


@dataclass
class FoundState:
    """The result of one search."""

    buffers: dict[str, Entries] = field(default_factory=dict)
    "The buffers of each module of the model, keyed by the prefix of their names."
    places: list[Entries | Items | Empty] = field(default_factory=list)
    "Dictionaries, attributes and lists; the model's come first."
    places_of_model: int = 0
    "Number of `places` that are the model's."
    empty: Empty = field(default_factory=Empty)
    "The place to which the search adds empty dictionaries."
    arrays: list[State] = field(default_factory=list)
    "Small numpy arrays and byte arrays."
    generators: list[State] = field(default_factory=list)
    tensors: dict[int, tuple[str, torch.Tensor]] = field(default_factory=dict)
    "Name and tensor, keyed by id."
    in_checkpoints: set[int] = field(default_factory=set)
    "Ids of tensors that are buffers or parameters of the model."
    trained: set[int] = field(default_factory=set)
    "Ids of parameters that the optimizer changes."
    switches: dict[str, Switches] = field(
        default_factory=lambda: {name: Switches(name) for name in ("training", "requires_grad", *SEARCHED)}
    )
    "Attributes of modules and tensors, keyed by name."
    of_model: set[int] = field(default_factory=set)
    "Ids of the tensors in `in_checkpoints` and in attributes of the model's modules."
    search: Search = field(default_factory=Search)
    "What the search read."

    def add_switches(self, name: str, tensor: Any, attributes: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """Keep these attributes of a tensor, and yield what is in them, with its name."""
        for attribute in attributes:
            yield f"{name}.{attribute}", self.switches[attribute].add(tensor)

    def refreshed(self) -> FoundState | None:
        """Return what a search would find now, at a fraction of its cost, or None if it may find something
        else."""
        tensors = (tensor for _, tensor in self.tensors.values())
        if not self.search.is_current() or not all(tensor.is_leaf for tensor in tensors):
            return None
        switches = {name: switch.refreshed() for name, switch in self.switches.items()}
        for name in SEARCHED:
            if not all(map(operator.is_, self.switches[name].values, switches[name].values)):
                return None
        return replace(
            self,
            arrays=[array.refreshed() for array in self.arrays],
            generators=[generator.refreshed() for generator in self.generators],
            switches=switches,
        )


class StateFinder:
    """Searches a model and other objects for state, each time it is called.

    `others` are the task, its data and the globals of its module, each with a name. Objects of libraries are
    not searched: they may share their state with their own threads.
    """

    def __init__(self, model: nn.Module, others: Iterable[tuple[str, Any]] = ()) -> None:
        self._modules = [
            (f"{name}." if name else "", one, classes_of(one)) for name, one in model.named_modules()
        ]
        self._parameters = {id(p) for p in model.parameters()}
        # These are the shards. During a pass FSDP replaces them with gathered parameters.
        self._named = list(model.named_parameters())
        self._trained = {id(p) for _, p in self._named if p.requires_grad}
        units = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]
        self._gathered = [
            Gathered(p) for unit in units for group in parameter_groups(unit) for p in group.fsdp_params
        ]
        # The model's modules are searched first. Each module's globals name Python's own.
        self._skipped = {id(vars(builtins)), *(id(module) for module in model.modules())}
        self._others = list(others)
        for _, value in self._others:
            count_as_own(type(value))

        self._last: FoundState | None = None

    def __call__(self) -> FoundState:
        self._last = (self._last and self._last.refreshed()) or self._search_all()
        return self._last

    def _search_all(self) -> FoundState:
        found = FoundState()
        found.places.append(found.empty)
        waiting: list[tuple[str, Any]] = []
        seen: set[int] = set()
        for name, p in self._named:
            found.tensors[id(p)] = name, p
            waiting += found.add_switches(name, p, ("requires_grad", *HOOKS_OF_TENSOR))
        for gathered in self._gathered:
            waiting += found.add_switches("gathered", gathered, HOOKS_OF_TENSOR)
        found.trained = self._trained
        for prefix, module, classes in self._modules:
            scripted = isinstance(module, torch.jit.ScriptModule)
            buffers = Slotted(module, module._buffers.keys) if scripted else module._buffers
            found.buffers[prefix] = Entries(prefix, buffers)
            found.search.reads(module._buffers)
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    found.tensors[id(buffer)] = f"{prefix}{key}", buffer
            self._search_module(prefix, module, classes, seen, found, waiting)
        found.in_checkpoints = set(found.tensors)
        self._visit(waiting, seen, found)
        found.of_model, found.places_of_model = set(found.tensors), len(found.places)
        for switches in found.switches.values():
            switches.of_model = len(switches.owners)
        found.empty = Empty()
        found.places.append(found.empty)
        self._visit([*reversed(self._others)], seen, found)
        return found

    def _visit(self, waiting: list[tuple[str, Any]], seen: set[int], found: FoundState) -> None:
        while waiting and len(seen) < MOST_OBJECTS:
            name, value = waiting.pop()
            sort = sort_of(value)
            if sort == "plain" or id(value) in seen or id(value) in self._skipped:
                continue
            seen.add(id(value))
            found.search.visits(value)
            if sort in ("object", "dict", "items", "tuple"):
                ignored = _set_by_the_loop(type(value))
                for attributes in attributes_of(value):
                    read = Without(attributes, ignored) if ignored else attributes
                    self._search(Entries(f"{name}.", attributes, ignored), found, waiting, read)
                self._search_classes(classes_of(value), seen, found, waiting)
            if sort == "tensor":
                if id(value) not in self._parameters:
                    found.tensors.setdefault(id(value), (name, value))
                    if value.is_leaf and (value.is_floating_point() or value.is_complex()):
                        waiting += found.add_switches(name, value, ("requires_grad", *SEARCHED))
            elif sort == "dict":
                if len(value) > MOST_ITEMS:
                    found.search.skips(value)
                else:
                    self._search(Entries(f"{name}.", value), found, waiting)
            elif sort == "items" or sort == "tuple":
                if len(value) > MOST_ITEMS:
                    found.search.skips(value)
                elif _is_activation(value):
                    found.search.meets_activation()
                else:
                    if sort == "items":
                        found.places.append(Items(name, value))
                        found.search.reads(value)
                    waiting += [(f"{name}[{at}]", one) for at, one in enumerate(value)]
            elif sort == "module":
                for inner, module in value.named_modules(prefix=name):
                    seen.add(id(module))
                    waiting.append((inner, module._buffers))
                    waiting += [
                        (f"{inner}.{key}", p) for key, p in module._parameters.items() if p is not None
                    ]
                    self._search_module(f"{inner}.", module, classes_of(module), seen, found, waiting)
            elif sort == "class":
                if _is_users(value):
                    seen.remove(id(value))
                    self._search_classes((value,), seen, found, waiting)
            elif sort == "method":
                waiting += [(name, inside) for inside in bound_to(value)]
            elif (state := state_of(name, value)) is not None:
                (found.generators if sort == "generator" else found.arrays).append(state)

    def _search_module(
        self,
        prefix: str,
        module: nn.Module,
        classes: tuple[Any, ...],
        seen: set[int],
        found: FoundState,
        waiting: list[tuple[str, Any]],
    ) -> None:
        """Search all of a module but its buffers and the content of its parameters. Of torch's own modules,
        such as Dropout, only numbers, text, `forward` and what hides a parameter can change."""
        found.switches["training"].add(module)
        if isinstance(module, LazyModuleMixin):
            return  # its first pass makes it another module, which it stays
        attributes = vars(module)
        for key in CHANGED_FOR_A_PASS:
            container = attributes.get(key)
            if container and isinstance(container, dict):  # a TorchScript module keeps others
                self._search(Entries(f"{prefix}{key}.", container), found, waiting)
            elif isinstance(container, dict):
                found.empty.kept.append(container)
                found.search.reads(container)
        parameters = attributes["_parameters"] if type(attributes.get("_parameters")) is dict else {}
        if not (self._gathered and id(module) in self._skipped):  # FSDP swaps shards and gathered ones
            found.places.append(Entries(prefix, parameters))
            found.search.reads(parameters)
        if classes:
            self._search(Entries(prefix, attributes, INTERNAL), found, waiting)
            self._search_classes(classes, seen, found, waiting)
            return
        keys = [key for key, one in attributes.items() if type(one) in _NUMBERS and key not in INTERNAL]
        keys += ["forward", *parameters]  # code may set them for a part of a pass
        own = Slotted(module, partial(_own, attributes, keys))
        self._search(Entries(prefix, own), found, waiting, attributes, keys)

    def _search_classes(
        self, classes: Iterable[Any], seen: set[int], found: FoundState, waiting: list[tuple[str, Any]]
    ) -> None:
        for cls in classes:
            if id(cls) not in seen:
                seen.add(id(cls))
                values = Slotted(cls, partial(values_of, cls))
                entries = Entries(f"{cls.__name__}.", values, _set_by_the_loop(cls))
                self._search(entries, found, waiting, container=vars(cls))

    def _search(
        self,
        entries: Entries,
        found: FoundState,
        waiting: list[tuple[str, Any]],
        container: Any = None,
        keys: Iterable[str] | None = None,
    ) -> None:
        """`container`, or its entries of these `keys`, is what to read later to see a change of `entries`, if
        that is not `entries.container`."""
        found.places.append(entries)
        if keys is None:
            found.search.reads(entries.container if container is None else container)
        else:
            found.search.reads_entries(container, keys)
        if any(isinstance(value, Detached) for value in entries.kept.values()):
            found.search.meets_activation()
        waiting += [
            (f"{entries.name}{_text_of(key)}", value)
            for key, value in entries.kept.items()
            if sort_of(value) != "plain" and not isinstance(value, Detached)
        ]


def _set_by_the_loop(kind: type) -> frozenset[str]:
    """Return the attributes of an object of this type that the training loop sets: only a task has any."""
    return frozenset(("loss_chunks", "current_step") if issubclass(kind, Task) else ())


Sort = Literal[
    "plain",
    "tensor",
    "dict",
    "items",
    "tuple",
    "module",
    "object",
    "class",
    "method",
    "array",
    "bytes",
    "generator",
]


def sort_of(value: Any, *, passed_on: bool = False) -> Sort:
    """Return how a search treats a value. `passed_on`: the model passes it on to its blocks, so that its
    attributes count whatever library its class is from."""
    cls: Any = type(value)
    sort = _sort(cls)
    return "object" if sort == "plain" and passed_on and _has_attributes(cls) else sort


@cache
def _sort(cls: Any) -> Sort:
    """Return how a search treats objects of this type. "plain": they hold nothing that could change."""
    if issubclass(cls, (MethodType, partial)):
        return "method"
    if issubclass(cls, type):
        return "class"
    if issubclass(cls, (FunctionType, BuiltinFunctionType, ModuleType)):
        return "plain"
    if issubclass(cls, torch.Tensor):
        return "plain" if cls is Replaced else "tensor"
    if issubclass(cls, (bytearray, array.array)):
        return "bytes"
    if issubclass(cls, (torch.Generator, random.Random)):
        return "generator"
    if numpy is not None and issubclass(cls, numpy.ndarray):
        return "array"
    if numpy is not None and issubclass(cls, (numpy.random.Generator, numpy.random.RandomState)):
        return "generator"
    if issubclass(cls, nn.Module):
        return "module"
    if issubclass(cls, dict):
        return "dict"
    if issubclass(cls, (list, set, deque)):
        return "items"
    if issubclass(cls, (tuple, frozenset)):
        return "tuple"
    return "object" if _is_users(cls) else "plain"


def classes_of(value: Any) -> tuple[Any, ...]:
    """Return the user's classes that `value` is an instance of. FSDP and parametrizations derive a new class
    from each of them."""
    cls: Any = type(value)
    return _users_classes(cls)


@cache
def _users_classes(cls: Any) -> tuple[Any, ...]:
    """Return the user's classes among the bases. For modules this includes classes of libraries such as
    transformers, but not torch's, which do not change."""
    if issubclass(cls, nn.Module):
        return tuple(one for one in cls.__mro__ if one.__module__.partition(".")[0] not in _BASES)
    return tuple(one for one in cls.__mro__ if _is_users(one))


@cache
def _has_attributes(cls: Any) -> bool:
    """Return whether instances of a library's class have attributes, as torch_geometric's Data has."""
    code = (FunctionType, BuiltinFunctionType, MethodType, ModuleType, partial, type, nn.Module)
    return not issubclass(cls, (*code, torch.Tensor)) and cls.__module__.partition(".")[0] not in (
        "builtins",
        "torch",
    )


def attributes_of(value: Any, *, passed_on: bool = False) -> Iterator[MutableMapping[str, Any]]:
    """Yield the attributes of an instance of a user's class; nothing for other objects. `passed_on`: see
    `sort_of`."""
    cls: Any = type(value)
    classes = classes_of(value) or (cls.__mro__ if passed_on and _has_attributes(cls) else ())
    if not classes:
        return
    if isinstance(getattr(value, "__dict__", None), dict):
        yield vars(value)
    slots = [
        name
        for cls in classes
        for name, one in vars(cls).items()
        if isinstance(one, MemberDescriptorType) and name != "__dict__"
    ]
    if slots:
        yield Slotted(value, partial(_set_in, value, slots))


def bound_to(method: Any) -> tuple[Any, ...]:
    """Return what a bound method or a functools.partial holds."""
    if isinstance(method, partial):
        return method.func, method.args, method.keywords
    return (method.__self__,)


def _set_in(value: Any, names: Iterable[str]) -> list[str]:
    return [name for name in names if hasattr(value, name)]


def _own(attributes: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    return [name for name in names if name in attributes]


def values_of(cls: type) -> list[str]:
    """Return the names of class attributes that are plain values or containers."""
    return [
        name
        for name, one in vars(cls).items()
        if not name.startswith("__") and (type(one) in _NUMBERS or _is_kept_by_class(one))
    ]


def _is_kept_by_class(value: Any) -> bool:
    """Return whether a class attribute may hold state. A descriptor is code."""
    return sort_of(value) in (*_CONTENT, "object", "module") and not hasattr(type(value), "__get__")


_OF_VALUES = (SimpleNamespace, argparse.Namespace, UserDict, UserList)
"Python's own classes of objects that hold any values."
_own_packages: set[str] = set()
"Packages of this process's tasks and data sets. Their classes are the user's even if installed."


def count_as_own(cls: type) -> None:
    """Let the classes of this one's package count as the user's, even if it is installed."""
    package = cls.__module__.partition(".")[0]
    if package not in (*_BASES, "launcher", "numpy", "datasets") and package not in _own_packages:
        _own_packages.add(package)
        for cached in (_sort, _is_users, _users_classes):
            cached.cache_clear()


@cache
def _is_users(cls: Any) -> bool:
    """Return whether a class is the user's: neither Python's nor an installed library's. Classes of
    torch.utils.data also count, because they wrap the user's data sets, and so do optimizers and their
    schedulers: those of the task are its state."""
    if issubclass(cls, (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)):
        return True
    if cls.__module__.startswith(("torch.utils.data", "launcher.")):
        return not cls.__module__.startswith("launcher.train.")
    if cls.__module__.partition(".")[0] in _own_packages or cls in _OF_VALUES:
        return True
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return (file is not None and not file.startswith(_LIBRARIES)) or cls.__module__ == "__main__"


def _is_activation(value: Any, depth: int = 2) -> bool:
    """Return whether `value` is or contains a tensor with an autograd graph, at most `depth` containers
    deep."""
    sort = sort_of(value)
    if sort in ("tuple", "items", "dict") and depth and len(value) <= MOST_ITEMS:
        inside = value.values() if sort == "dict" else value
        if all(_sort(cls) == "plain" for cls in set(map(type, inside))):
            return False
        return any(_is_activation(one, depth - 1) for one in inside)
    return bool(sort == "tensor" and not value.is_leaf)


_NUMBERS = (int, float, complex, bool, str, bytes, type(None))
_CONTENT = ("tensor", "dict", "items", "tuple", "array", "bytes", "generator")


def _is_state(value: Any, numbers: bool = False, depth: int = 3) -> bool:
    """Return whether later steps may use `value`, or a value inside a tuple, list or dictionary: the state of
    an LSTM is a tuple. Activations do not count: they belong to one pass. Numbers count with `numbers`."""
    if type(value) in (tuple, list, dict):
        inside = value.values() if isinstance(value, dict) else value
        return depth > 0 and any(
            _is_state(one, numbers, depth - 1) for one in itertools.islice(inside, MOST_ITEMS)
        )
    if numbers and isinstance(value, Number):
        return True
    return sort_of(value) in ("tensor", "array", "bytes", "generator") and not _is_activation(value)


def _fill(array: Any, values: Any) -> None:
    array[...] = values


def _fill_bytes(container: Any, kept: Any) -> None:
    container[:] = kept


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


_NOT_WRAPPED = (torch.Tensor, nn.Parameter)
"Types that need no slow check for a tensor that consists of others."


def content(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return this rank's part as a plain tensor; None if its content cannot be copied and restored."""
    if not tensor.is_leaf or is_lazy(tensor):
        return None
    plain: Any = tensor
    if isinstance(tensor, DTensor):
        plain = tensor.detach()
        plain = plain.to_local()
    if plain.is_meta or plain.layout is not torch.strided or plain.is_nested or plain.is_quantized:
        return None
    if type(plain) not in _NOT_WRAPPED and is_traceable_wrapper_subclass(plain):
        return None
    freed = plain.numel() > 0 and plain.untyped_storage().nbytes() == 0
    return None if freed else plain

"""Find the state of a task and its model besides trained parameters, through their attributes.

A model may keep state in buffers, in attributes (a tensor, a counter), in its own random number generator, or
in a list of the task. `StateFinder` finds the state that can be copied and restored.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.lazy import LazyModuleMixin

from launcher.train.local_shards import parameter_groups
from launcher.train.task import Task
from launcher.train.undo.containers import Containers, Without
from launcher.train.undo.objects import (
    INTERNAL,
    MOST_ITEMS,
    MOST_OBJECTS,
    NUMBERS,
    Slotted,
    attributes_of,
    bound_to,
    classes_of,
    count_as_own,
    is_activation,
    is_users,
    sort_of,
    values_of,
)
from launcher.train.undo.saved_state import (
    HOOKS_OF_TENSOR,
    Detached,
    Empty,
    Entries,
    Gathered,
    Items,
    State,
    Switches,
    state_of,
    text_of,
)

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
SEARCHED = ("grad", *HOOKS_OF_TENSOR)
"Attributes of tensors that hold what a search visits."
SWITCHES = ("training", "__class__", "requires_grad", *SEARCHED)
"Attributes of modules and tensors that are kept one by one."


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
    switches: dict[str, Switches] = field(default_factory=lambda: {name: Switches(name) for name in SWITCHES})
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
                elif is_activation(value):
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
                if is_users(value):
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
        found.switches["__class__"].add(module)  # a parametrization makes it an instance of a new class
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
        keys = [key for key, one in attributes.items() if type(one) in NUMBERS and key not in INTERNAL]
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
            (f"{entries.name}{text_of(key)}", value)
            for key, value in entries.kept.items()
            if sort_of(value) != "plain" and not isinstance(value, Detached)
        ]


def _set_by_the_loop(kind: type) -> frozenset[str]:
    """Return the attributes of an object of this type that the training loop sets: only a task has any."""
    return frozenset(("loss_chunks", "current_step") if issubclass(kind, Task) else ())


def _own(attributes: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    return [name for name in names if name in attributes]

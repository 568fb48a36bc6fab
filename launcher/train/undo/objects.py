"""How a search for state treats an object: by its type, and whether its class is the user's."""

from __future__ import annotations

import argparse
import array
import itertools
import random
import sys
import sysconfig
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
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
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from launcher.train.pipeline_parts import CHUNKS
from launcher.train.replaced_parameters import Replaced
from launcher.train.rng import numpy

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
NUMBERS = (int, float, complex, bool, str, bytes, type(None))
_BASES = ("torch", "builtins", "abc", "typing", "collections")
_LIBRARIES = tuple({f"{Path(sysconfig.get_path(name))}/" for name in ("stdlib", "purelib", "platlib")})
_CONTENT = ("tensor", "dict", "items", "tuple", "array", "bytes", "generator")
_OF_VALUES = (SimpleNamespace, argparse.Namespace, UserDict, UserList)
"Python's own classes of objects that hold any values."
_own_packages: set[str] = set()
"Packages of this process's tasks and data sets. Their classes are the user's even if installed."
_NOT_WRAPPED = (torch.Tensor, nn.Parameter)
"Types that need no slow check for a tensor that consists of others."
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
    return "object" if is_users(cls) else "plain"


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
    return tuple(one for one in cls.__mro__ if is_users(one))


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


def _set_in(value: Any, names: Iterable[str]) -> list[str]:
    return [name for name in names if hasattr(value, name)]


def bound_to(method: Any) -> tuple[Any, ...]:
    """Return what a bound method or a functools.partial holds."""
    if isinstance(method, partial):
        return method.func, method.args, method.keywords
    return (method.__self__,)


def values_of(cls: type) -> list[str]:
    """Return the names of class attributes that are plain values or containers."""
    return [
        name
        for name, one in vars(cls).items()
        if not name.startswith("__") and (type(one) in NUMBERS or _is_kept_by_class(one))
    ]


def _is_kept_by_class(value: Any) -> bool:
    """Return whether a class attribute may hold state. A descriptor is code."""
    return sort_of(value) in (*_CONTENT, "object", "module") and not hasattr(type(value), "__get__")


def count_as_own(cls: type) -> None:
    """Let the classes of this one's package count as the user's, even if it is installed."""
    package = cls.__module__.partition(".")[0]
    if package not in (*_BASES, "launcher", "numpy", "datasets") and package not in _own_packages:
        _own_packages.add(package)
        for cached in (_sort, is_users, _users_classes):
            cached.cache_clear()


@cache
def is_users(cls: Any) -> bool:
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


def is_activation(value: Any, depth: int = 2) -> bool:
    """Return whether `value` is or contains a tensor with an autograd graph, at most `depth` containers
    deep."""
    sort = sort_of(value)
    if sort in ("tuple", "items", "dict") and depth and len(value) <= MOST_ITEMS:
        inside = value.values() if sort == "dict" else value
        if all(_sort(cls) == "plain" for cls in set(map(type, inside))):
            return False
        return any(is_activation(one, depth - 1) for one in inside)
    return bool(sort == "tensor" and not value.is_leaf)


def is_state(value: Any, numbers: bool = False, depth: int = 3) -> bool:
    """Return whether later steps may use `value`, or a value inside a tuple, list or dictionary: the state of
    an LSTM is a tuple. Activations do not count: they belong to one pass. Numbers count with `numbers`."""
    if type(value) in (tuple, list, dict):
        inside = value.values() if isinstance(value, dict) else value
        return depth > 0 and any(
            is_state(one, numbers, depth - 1) for one in itertools.islice(inside, MOST_ITEMS)
        )
    if numbers and isinstance(value, Number):
        return True
    return sort_of(value) in ("tensor", "array", "bytes", "generator") and not is_activation(value)


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

"""Tensors and arrays that share memory with the model's, such as `self.kept = self.head.weight.data`.

They follow the training only while the model's tensor keeps its memory. A cast, a move to a GPU, FSDP, tensor
parallelism and pipeline stages move it to other memory, and the kept tensor would have the initial values
forever: a task that averages a teacher through `.data` would write where the model does not read.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import suppress
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from launcher.train.rank import SetupError
from launcher.train.replaced_parameters import Replaced
from launcher.train.task import Task
from launcher.train.undo.objects import (
    INTERNAL,
    MOST_OBJECTS,
    attributes_of,
    bound_to,
    classes_of,
    count_as_own,
    sort_of,
    values_of,
)

PLAIN = (nn.Parameter, torch.Tensor)
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Span(NamedTuple):
    start: int
    end: int


class Owner:
    """A parameter or buffer of the model, with its earlier memory."""

    def __init__(
        self, name: str, container: MutableMapping[str, Any], key: str, tensor: torch.Tensor, span: Span
    ) -> None:
        """`container`: the module's parameters or buffers, which have the tensor at `key`. TorchScript's are
        not a mapping."""
        self.name, self.span = name, span
        self.is_parameter = isinstance(tensor, nn.Parameter)
        self.trained = False
        self._container, self._key, self._tensor = container, key, weakref.ref(tensor)
        self._shape, self._layout = tensor.shape, _layout(tensor)

    @property
    def order(self) -> tuple[int, int, bool]:
        """Sort key that puts each owner before the owners of parts of its memory."""
        return self.span.start, -self.span.end, not self.is_parameter

    @property
    def now(self) -> Any:
        """The model's tensor in this place."""
        with suppress(KeyError):
            return self._container[self._key]
        return None

    def repoint_old(self) -> None:
        """Move the tensor that was in this place, if it is still referred to, to the memory of the new
        one."""
        old = self._tensor()
        if old is not None and old is not self.now:
            self.repoint(old, self._layout)

    @torch.no_grad()
    def repoint(self, kept: Any, layout: Layout | None) -> bool:
        """Move a tensor that shared a part of the owner's earlier memory to that part of its present memory.
        Return False if there is none, because the owner was divided, left this rank, or has another order in
        memory.

        `layout`: of `kept` when it shared the memory.
        """
        now = self.now
        if type(kept) not in PLAIN or type(now) not in PLAIN or layout is None or self._layout is None:
            return False
        apart = layout.dtype != self._layout.dtype or not kept.is_leaf or now.shape != self._shape
        if apart or _span(now) == self.span or not torch._has_compatible_shallow_copy_type(kept, now):
            return False
        if layout == self._layout and kept.shape == now.shape:
            kept.data = now.detach()
            return True
        first = layout.offset - self._layout.offset
        if layout.storage != self._layout.storage or now.stride() != self._layout.steps or first < 0:
            return False
        if not _reaches(now, kept.shape, layout.steps, first):
            return False
        kept.data = now.detach().as_strided(kept.shape, layout.steps, now.storage_offset() + first)
        return True


class Layout(NamedTuple):
    """The memory of a tensor's elements."""

    dtype: torch.dtype
    storage: int
    offset: int
    steps: tuple[int, ...]


class Kept(NamedTuple):
    """An object that shares memory with a tensor of the model."""

    name: str
    value: Any
    layout: Layout | None
    owner: Owner
    itself: Owner | None = None
    "Set if the object is itself a parameter or buffer of the model, which launcher reads and moves."

    @property
    def trained(self) -> bool:
        return self.owner.trained or (self.itself is not None and self.itself.trained)


class KeptMemory:
    """Objects of the task and the model that share memory with the model's parameters and buffers.

    Create it before these may move to other memory, and call `check` afterwards.
    """

    def __init__(self, model: nn.Module, task: Task) -> None:
        sharing, owners = list[Kept](), list[Owner]()
        self._buffers = list[Owner]()
        own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        for owner, tensor in sorted(_owned_by(model), key=lambda one: one[0].order):
            owner.trained = tensor.requires_grad and task.adapter is None  # an adapter freezes the model
            if not owner.is_parameter:
                self._buffers.append(owner)
            if owners and owner.span.start < owners[-1].span.end:
                kept = tensor.detach()  # keeps the memory: no other parameter gets it
                sharing.append(Kept(owner.name, kept, _layout(kept), owners[-1], owner))
            else:
                owners.append(owner)
        for name, value in _held_by(model, task):
            if id(value) not in own and (span := _span(value)) is not None:
                at = bisect_left(owners, span.end, key=lambda one: one.span.start) - 1
                if at >= 0 and span.start < owners[at].span.end:
                    sharing.append(Kept(name, value, _layout(value), owners[at]))
        self._sharing = sharing

    def check(self, model: nn.Module) -> None:
        """Move objects that share memory with a buffer or a frozen parameter to its present memory. If that
        is not possible, or if the parameter is trained, make each later use of the tensor raise TaskError.

        An array cannot be moved. One that shares memory with a buffer or a frozen parameter is often a table
        from which the model was made, so it becomes read-only.

        Raises SetupError for objects that share memory with a trained parameter and can be used without a
        call of torch: arrays, and buffers and parameters of `model`, which is the model now.
        """
        for owner in self._buffers:  # a cast puts another tensor in the place of a buffer
            owner.repoint_old()
        if not self._sharing:
            return
        tensors = (*model.parameters(), *model.buffers())
        now = {span.start for tensor in tensors if (span := _span(tensor)) is not None}
        for kept in self._sharing:
            if kept.owner.span.start in now:
                continue
            if not kept.trained:
                value = kept.value if kept.itself is None else kept.itself.now
                if sort_of(value) == "array":
                    value.flags.writeable = False
                if kept.owner.repoint(value, kept.layout) or not kept.owner.is_parameter:
                    continue
            reason = (
                f"{kept.name} uses the memory of {kept.owner.name} of the model, which this recipe casts, "
                f"moves or shards: {kept.name} would keep the initial values. Read {kept.owner.name} from "
                "its module at each use, as in module.weight, instead of keeping its data; to tie two "
                "parameters, use the same nn.Parameter for both; for a copy, call .clone()"
            )
            if kept.itself is None and type(kept.value) in PLAIN:
                kept.value.__class__ = Replaced
                kept.value.reason = reason
            elif kept.trained:
                raise SetupError(reason)


def _owned_by(model: nn.Module) -> Iterator[tuple[Owner, torch.Tensor]]:
    """Yield each parameter and buffer that has memory."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for container in (module._parameters, module._buffers):
            for key, tensor in container.items():
                if tensor is not None and id(tensor) not in seen and (span := _span(tensor)) is not None:
                    seen.add(id(tensor))
                    yield Owner(f"{prefix}.{key}" if prefix else key, container, key, tensor, span), tensor


def _held_by(model: nn.Module, task: Task) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and arrays in attributes, closures and hooks of the model and the task and in globals
    of the task's module, the nearest first, each with its name."""
    count_as_own(type(task))
    waiting: deque[tuple[str, Any]] = deque([("", model), ("task", task)])
    if (module := sys.modules.get(type(task).__module__)) is not None:
        waiting.append((module.__name__, vars(module)))
    seen: set[int] = set()
    while waiting and len(seen) < MOST_OBJECTS:
        name, value = waiting.popleft()
        sort = "function" if isinstance(value, FunctionType) else sort_of(value)
        if sort == "plain" or id(value) in seen:
            continue
        seen.add(id(value))
        if sort in ("tensor", "array"):
            yield name, value
        waiting += _inside(name, value, sort)


def _inside(name: str, value: Any, sort: str) -> Iterator[tuple[str, Any]]:
    """Yield the contents of a value: attributes, elements, hooks, or variables of a closure."""
    prefix = f"{name}." if name else ""
    if sort == "module":
        for key in HOOKS:
            yield from [(f"{prefix}{key}", one) for one in vars(value).get(key, {}).values()]
        yield from [(f"{prefix}{key}", one) for key, one in value._modules.items()]
        if classes_of(value):
            yield from [(f"{prefix}{key}", one) for key, one in vars(value).items() if key not in INTERNAL]
    elif sort == "dict":
        entries = itertools.islice(list(value.items()), MOST_OBJECTS)
        yield from [(f"{prefix}{key}", one) for key, one in entries]
    elif sort in ("items", "tuple"):
        items = enumerate(itertools.islice(value, MOST_OBJECTS))
        yield from [(f"{name}[{at}]", one) for at, one in items]
    elif sort == "method":
        yield from [(name, one) for one in bound_to(value)]
    elif sort == "function":
        yield from [(f"{prefix}{key}", one) for key, one in _enclosed(value)]
    elif sort == "object":
        for attributes in attributes_of(value):
            yield from [(f"{prefix}{key}", one) for key, one in attributes.items()]
    for kind in classes_of(value) if sort in ("module", "object") else ():
        yield from [(f"{kind.__name__}.{key}", vars(kind)[key]) for key in values_of(kind)]


def _enclosed(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what a function keeps: the variables of its closure, and the defaults of its arguments."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not assigned yet
            yield name, cell.cell_contents
    yield from [(function.__name__, one) for one in function.__defaults__ or ()]
    yield from (function.__kwdefaults__ or {}).items()


def _layout(value: Any) -> Layout | None:
    """Return None for arrays, and for tensors that have no memory of their own."""
    if type(value) not in PLAIN or value.layout is not torch.strided:
        return None
    return Layout(value.dtype, value.untyped_storage()._cdata, value.storage_offset(), value.stride())


def _reaches(owner: torch.Tensor, shape: Sequence[int], steps: Sequence[int], first: int) -> bool:
    """Return whether the memory of `owner` has all elements of a tensor that begins at element `first`."""
    span = _bounds(0, owner.shape, owner.stride(), 1), _bounds(first, shape, steps, 1)
    return span[0] is not None and span[1] is not None and span[1].end <= span[0].end


def _span(value: Any) -> Span | None:
    """Return the first address of a tensor or array and the one after its last; None without elements.

    A tensor without memory, on the meta device or of a trace, has the address of its storage object.
    """
    if not isinstance(value, torch.Tensor):
        return _bounds(value.ctypes.data, value.shape, value.strides, value.itemsize)
    if isinstance(value, DTensor):
        value = value._local_tensor
    if value.layout is not torch.strided or value.is_nested or is_traceable_wrapper_subclass(value):
        return None
    if isinstance(value, FakeTensor) or not (start := value.data_ptr()):
        start = value.untyped_storage()._cdata
        return Span(start, start + 1)
    steps = [step * value.element_size() for step in value.stride()]
    return _bounds(start, value.shape, steps, value.element_size())


def _bounds(first: int, shape: Sequence[int], steps: Sequence[int], size: int) -> Span | None:
    """`first`: address of the first element; `steps`: bytes between neighbours; `size`: bytes of one."""
    if 0 in shape:
        return None
    ways = [(length - 1) * step for length, step in zip(shape, steps, strict=True)]
    low, high = sum(min(way, 0) for way in ways), sum(max(way, 0) for way in ways)
    return Span(first + low, first + high + size)

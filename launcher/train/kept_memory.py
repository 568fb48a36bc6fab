"""Tensors and arrays that use the memory of a trained parameter, such as `self.kept = self.head.weight.data`.

They follow the training only while the parameter keeps its memory. A cast, a move to a GPU, FSDP, tensor
parallelism and pipeline stages give it another one, and what was kept would have the initial values for ever.
"""

from __future__ import annotations

import itertools
import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from launcher.train.rank import SetupError
from launcher.train.recovery.state_finder import (
    INTERNAL,
    MOST_OBJECTS,
    attributes_of,
    bound_to,
    classes_of,
    count_as_own,
    sort_of,
)
from launcher.train.replaced import Replaced
from launcher.train.task import Task


class Span(NamedTuple):
    start: int
    end: int


class Kept(NamedTuple):
    """An object that uses the memory of a parameter without being one of the model's parameters."""

    name: str
    value: Any
    in_model: bool
    "It is a buffer or a parameter of the model: launcher itself reads and moves it."
    parameter: str
    memory: Span
    "That of the parameter."


class KeptMemory:
    """What the task and the model keep of the memory of the trained parameters.

    Create it before something may give the parameters another memory, and call `check` afterwards.
    """

    def __init__(self, model: nn.Module, task: Task) -> None:
        parameters = sorted(
            (span, name, p)
            for name, p in model.named_parameters()
            if p.requires_grad and (span := _span(p)) is not None
        )
        spans = [span for span, _, _ in parameters]
        own = {id(p) for p in model.parameters()}
        self._found = [
            Kept(name, p.detach(), True, other, memory)  # keeps the memory: no other parameter gets it
            for (memory, other, _), (span, name, p) in itertools.pairwise(parameters)
            if span.start < memory.end
        ]
        for name, value, in_model in _held_by(model, task):
            if id(value) not in own and (span := _span(value)) is not None:
                at = bisect_left(spans, span.end, key=lambda one: one.start) - 1
                if at >= 0 and span.start < spans[at].end:
                    self._found.append(Kept(name, value, in_model, parameters[at][1], spans[at]))

    def check(self, model: nn.Module) -> None:
        """Make each later use of a tensor raise TaskError if its parameter has another memory now.

        `model`: as it is now. Raises SetupError for what is used without a call of torch: arrays, and what
        is a buffer or a parameter of the model.
        """
        if not self._found:
            return
        now = {span.start for p in model.parameters() if (span := _span(p)) is not None}
        for kept in self._found:
            if kept.memory.start in now:
                continue
            reason = (
                f"{kept.name} uses the memory of {kept.parameter} of the model, which this recipe casts, "
                f"moves or shards: {kept.name} would keep the initial values. Read {kept.parameter} from its "
                "module at each use, as in module.weight, instead of keeping its data; to tie two "
                "parameters, use the same nn.Parameter for both; for a copy, call .clone()"
            )
            if kept.in_model or type(kept.value) not in (nn.Parameter, torch.Tensor):
                raise SetupError(reason)
            kept.value.__class__ = Replaced
            kept.value.reason = reason


def _held_by(model: nn.Module, task: Task) -> Iterator[tuple[str, Any, bool]]:
    """Yield the tensors and arrays in attributes of the model and the task and in globals of the task's
    module, the nearest first: name, object, and whether it is a buffer of the model."""
    count_as_own(type(task))
    waiting: deque[tuple[str, Any]] = deque([("", model), ("task", task)])
    if (module := sys.modules.get(type(task).__module__)) is not None:
        waiting.append((module.__name__, vars(module)))
    seen: set[int] = set()
    of_model = {id(buffer) for buffer in model.buffers()}
    while waiting and len(seen) < MOST_OBJECTS:
        name, value = waiting.popleft()
        sort = sort_of(value)
        if sort == "plain" or id(value) in seen:
            continue
        seen.add(id(value))
        inside = name and f"{name}."
        if sort in ("tensor", "array"):
            yield name, value, id(value) in of_model
        elif sort == "module":
            waiting += [(f"{inside}{key}", one) for key, one in value._buffers.items()]
            waiting += [(f"{inside}{key}", one) for key, one in value._modules.items()]
            if classes_of(value):
                waiting += [(f"{inside}{k}", one) for k, one in vars(value).items() if k not in INTERNAL]
        elif sort == "dict":
            entries = itertools.islice(list(value.items()), MOST_OBJECTS)
            waiting += [(f"{inside}{key}", one) for key, one in entries]
        elif sort in ("items", "tuple"):
            items = enumerate(itertools.islice(value, MOST_OBJECTS))
            waiting += [(f"{name}[{at}]", one) for at, one in items]
        elif sort == "method":
            waiting += [(name, one) for one in bound_to(value)]
        elif sort == "object":
            for attributes in attributes_of(value):
                waiting += [(f"{inside}{key}", one) for key, one in attributes.items()]


def _span(value: Any) -> Span | None:
    """Return the first address of a tensor or array and the one behind its last; None without elements.

    A tensor without memory, on the meta device or of a trace, has the address of its storage object.
    """
    if not isinstance(value, torch.Tensor):
        return _bounds(value.ctypes.data, value.shape, value.strides, value.itemsize)
    if isinstance(value, DTensor):
        value = value._local_tensor
    if value.layout is not torch.strided or is_traceable_wrapper_subclass(value):
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

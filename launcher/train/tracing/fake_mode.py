"""torch's mode for fake tensors, with a faster lookup of cached results and with values that code reads.

FakeTensorMode caches the results of an operator by the metadata of its arguments. Its keys also cover
symbolic shapes, sparse tensors and graphs, and took a third of the time of a trace.

FakeTensorMode also computes with the values of small constants. With `knows_integers`, these are all integers
and booleans of the batch and what is computed from them alone, so that code may read lengths, masks and
targets. With `assumed`, single numbers and indices that the model computes have values too, so that code may
read a loss or an accuracy, and loop over experts. This takes longer, so a trace first tries without it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch
import torch._subclasses.fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

_CONSTANTS = frozenset(
    (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)

_torch: Any = torch._subclasses.fake_tensor
_FROM_ENTRY = getattr(FakeTensorMode, "_output_from_cache_entry", None)
_ARGUMENTS = [*inspect.signature(_FROM_ENTRY).parameters][1:] if _FROM_ENTRY is not None else []
_TAKES_FUNC = "func" in _ARGUMENTS
"Up to torch 2.14."
_HAS_PRIVATE_PARTS = hasattr(_torch, "_DispatchCacheValidEntry") and (
    _ARGUMENTS in (["state", "entry", "key", "func", "args"], ["state", "entry", "key", "args"])
)
"Whether this torch has the private parts of torch 2.13 to 2.15 that TraceMode uses."

LARGEST_KNOWN = 2**24
"Maximum number of elements of a tensor whose values are known. Larger ones take long to compute with."

_aten = torch.ops.aten
_FACTORIES = frozenset(
    (
        *(_aten.arange.default, _aten.arange.start, _aten.arange.start_step),
        *(_aten.zeros.default, _aten.ones.default, _aten.full.default),
    )
)
"Operators that create a tensor from Python numbers alone."

_CONDITIONS = {
    **dict.fromkeys((_aten.any.default, _aten.any.dim, _aten.any.dims, _aten._is_any_true.default), False),
    **dict.fromkeys((_aten.all.default, _aten.all.dim, _aten.all.dims, _aten._is_all_true.default), True),
}
"""Operators that reduce computed booleans -> the usual value. Most code asks whether any number is not
finite, or whether all numbers are."""

_NOT_FINITE = frozenset(
    (_aten.isnan.default, _aten.isinf.default, _aten.isposinf.default, _aten.isneginf.default)
)
_COMPARISONS = frozenset((_aten.eq.Tensor, _aten.ne.Tensor, _aten.eq.Scalar, _aten.ne.Scalar))

_CHOICES = {
    **dict.fromkeys((_aten.argmax.default, _aten.argmin.default, _aten.max.dim, _aten.min.dim), 1),
    _aten.sort.default: 1,
    _aten.topk.default: 2,
}
"""Operators whose results are indices along a dimension -> the position of this dimension in their arguments.
Each index is assumed to occur equally often: the tokens of a batch are divided evenly among experts."""


_DRAWS: dict[Any, Callable[..., tuple[int, int]]] = {
    **dict.fromkeys((_aten.randint.default, _aten.randint.generator), lambda high, *_: (0, high - 1)),
    **dict.fromkeys((_aten.randint.low, _aten.randint.low_generator), lambda low, high, *_: (low, high - 1)),
    _aten.random_.to: lambda _, high: (0, high - 1),
    getattr(_aten.random_, "from"): lambda _, low, high: (low, low if high is None else high - 1),
    **dict.fromkeys((_aten.bernoulli.default, _aten.bernoulli.p), lambda *_: (0, 1)),
    **dict.fromkeys((_aten.bernoulli_.float, _aten.bernoulli_.Tensor), lambda *_: (0, 1)),
}
"Operators that draw whole numbers -> the lowest and the highest one, of their arguments."


class Assumed(NamedTuple):
    """The values of single numbers that the model computes, and of conditions on many of them."""

    real: float
    integer: int
    drawn: Literal["lowest", "highest"]
    "The number in its range that torch draws."
    usual: bool = True
    "Whether any() is false and all() is true. Conditions that ask which numbers are finite always are so."


ASSUMPTIONS = (
    Assumed(1.0, 1, "lowest"),
    Assumed(-0.5, 2, "highest"),
    Assumed(100.0, 64, "highest", usual=False),
)
"""A step is only traced if it allocates the same under each of them. It may raise under the unusual one, as a
check does."""

MOST_READS = 2**12
"Maximum number of assumed numbers that code may read. A loop that waits for another value would not end."


class EndlessError(Exception):
    """Code reads so many assumed numbers that it probably waits for another one."""


_NO_SYMBOLS: Any = None
"In place of torch's key, which only symbolic shapes read."


class TraceMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """FakeTensorMode that looks up the results for ordinary arguments by its own key."""

    def __init__(self, *, knows_integers: bool = False, assumed: Assumed | None = None) -> None:
        super().__init__()
        self.knows_integers = knows_integers
        self.assumed = assumed
        self._reads = 0

    _entries: dict[tuple[Any, ...], Any] = {}
    "(operator, arguments) -> torch's entry, for all instances. Only results that torch caches have one."

    def new(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a fake tensor with the form of this real one, and its values if they are known here."""
        if self.may_turn_const(tensor):
            return self._known(tensor)
        return torch.empty(tensor.shape, dtype=tensor.dtype)

    def _known(self, tensor: torch.Tensor) -> torch.Tensor:
        with _disable_current_modes():
            copy = tensor.clone(memory_format=torch.contiguous_format)
            return self.fake_tensor_converter.from_real_tensor(self, copy, make_constant=True)

    def may_turn_const(self, t: torch.Tensor) -> bool:
        """Return whether the values of this real tensor are to be known: torch asks this of each result of
        known values."""
        return super().may_turn_const(t) or (type(t) is torch.Tensor and self._knows(t, t.device))

    def _knows(self, tensor: torch.Tensor, device: torch.device) -> bool:
        integers = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
        strided = device.type == "cpu" and tensor.layout == torch.strided
        return self.knows_integers and integers and strided and tensor.numel() <= LARGEST_KNOWN

    def _assume(self, func: Any, args: Sequence[Any], result: FakeTensor, assumed: Assumed) -> None:
        """Give a result of an operator its assumed value if it is a single number, or indices."""
        if result.constant is not None or result.fake_device.type != "cpu":
            return
        with _disable_current_modes():
            single = result.numel() == 1
            value = self._number(func, args, result, assumed) if single else _indices(func, args, result)
        if value is not None:
            self._set_value(result, value)
            result.is_guessed = single  # type: ignore[attr-defined]

    def _number(
        self, func: Any, args: Sequence[Any], result: FakeTensor, assumed: Assumed
    ) -> torch.Tensor | None:
        dtype, value = result.dtype, assumed.real
        if func in _DRAWS:
            value = _DRAWS[func](*args)[assumed.drawn == "highest"]
        elif dtype == torch.bool:
            if func not in _CONDITIONS:
                return None
            value = _CONDITIONS[func]
            if not getattr(args[0], "is_about_finite", False):
                value = value == assumed.usual
        elif not (dtype.is_floating_point or dtype.is_complex):
            value = assumed.integer
        return torch.full(result.shape, value, dtype=dtype)

    def _count_read(self) -> None:
        self._reads += 1
        if self._reads > MOST_READS:
            raise EndlessError(f"the code reads more than {MOST_READS} numbers that the model computes")

    def _set_value(self, fake: FakeTensor, value: torch.Tensor) -> None:
        fake.constant = value
        # Writes into memory that it shares with others change their values too.
        self.fake_tensor_converter.add_constant_storage_mapping(fake)

    def _cached_dispatch_impl(
        self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if self.assumed is None:
            return self._result(func, types, args, kwargs)
        # Known from guessed values, not from the sample or from assumed indices.
        guessed = any(getattr(each, "is_guessed", False) for each in tree_leaves((args, kwargs)))
        if guessed and func is _aten._local_scalar_dense.default:
            self._count_read()
        result = self._result(func, types, args, kwargs)
        about_finite = _is_about_finite(func, args)
        for each in tree_leaves(result):
            if isinstance(each, FakeTensor):
                if about_finite:
                    each.is_about_finite = True  # type: ignore[attr-defined]
                self._assume(func, args, each, self.assumed)
                if guessed and each.constant is not None:
                    each.is_guessed = True  # type: ignore[attr-defined]
        return result

    def _view(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return a view of a tensor with known values. torch would return a tensor with memory of its own."""
        tensor, constant = args[0], args[0].constant
        tensor.constant = None
        try:
            views = self._result(func, types, args, kwargs)
        finally:
            tensor.constant = constant
        with _disable_current_modes():
            values = func(constant, *args[1:], **kwargs)
        for view, value in zip(tree_leaves(views), tree_leaves(values), strict=True):
            if self.may_turn_const(value):
                self._set_value(view, value)
        return views

    def _result(
        self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if getattr(func, "is_view", False) and getattr(args[0], "constant", None) is not None:
            return self._view(func, types, args, kwargs)
        if self.knows_integers and func in _FACTORIES:
            made: Any = super()._cached_dispatch_impl(func, types, args, kwargs)
            if made.constant is not None or not self._knows(made, made.fake_device):
                return made
            with _disable_current_modes():
                return self._known(func(*args, **kwargs))
        parts = [func, torch.get_default_dtype(), torch._C._get_default_device()]
        parts.append(torch.is_inference_mode_enabled())
        ordinary = _HAS_PRIVATE_PARTS and self.shape_env is None
        if not (ordinary and self._add(parts, args) and self._add(parts, kwargs.items())):
            return super()._cached_dispatch_impl(func, types, args, kwargs)
        key, state = tuple(parts), _torch._CacheKeyState(None)
        if (entry := self._entries.get(key)) is not None:
            return self._output_from_cache_entry(
                state, entry, _NO_SYMBOLS, *((func, args) if _TAKES_FUNC else (args,))
            )
        result = super()._cached_dispatch_impl(func, types, args, kwargs)
        with suppress(_torch._BypassDispatchCache):
            entry = self.cache.get(self._cache_key(state, func, args, kwargs))
            if isinstance(entry, _torch._DispatchCacheValidEntry):
                self._entries[key] = entry
        return result

    def _add(self, parts: list[Any], args: Iterable[Any]) -> bool:
        """Add the properties that determine a result to a key. Return False if an argument is not covered."""
        for arg in args:
            cls = type(arg)
            if cls is FakeTensor:
                if arg.fake_mode is not self or arg.constant is not None or arg.layout != torch.strided:
                    return False
                parts += (arg.shape, arg.stride(), arg.dtype, arg.fake_device, arg.storage_offset())
                parts += (arg.untyped_storage().nbytes(), arg.requires_grad, arg.is_conj(), arg.is_neg())
                parts.append(arg.is_inference())
            elif cls in _CONSTANTS:
                parts += (cls, arg)  # 1 and 1.0 are equal
            elif cls in (list, tuple):
                parts += (cls, len(arg))
                if not self._add(parts, arg):
                    return False
            else:
                return False
        return True


def _is_about_finite(func: Any, args: Sequence[Any]) -> bool:
    """Return whether the operator asks which numbers are finite, as torch.isfinite does by comparisons, or
    combines such answers."""
    if func in _NOT_FINITE:
        return True
    if func in _COMPARISONS and (args[0] is args[1] or (isinstance(args[1], float) and math.isinf(args[1]))):
        return True
    asked = [each for each in tree_leaves(args) if isinstance(each, FakeTensor)]
    return bool(asked) and all(getattr(each, "is_about_finite", False) for each in asked)


def _indices(func: Any, args: Sequence[Any], result: FakeTensor) -> torch.Tensor | None:
    """Return 0, 1, 2, ... along the dimension, from row to row, and again from 0 after the largest index."""
    position = _CHOICES.get(func)
    if position is None or result.dtype != torch.int64 or result.numel() > LARGEST_KNOWN:
        return None
    dim: int = args[position] if len(args) > position else -1
    indices: torch.Tensor = torch.arange(result.numel()) % args[0].shape[dim]
    shape = list(result.shape)
    if result.dim() == args[0].dim():
        shape.append(shape.pop(dim))
        indices = indices.view(shape).movedim(-1, dim)
    return indices.view(result.shape)


@contextmanager
def numbers_as_of_tensors() -> Iterator[None]:
    """Let torch.tensor take lists that contain fake tensors with known numbers, and f-strings format them.
    torch's own functions do so with real tensors only."""
    of_torch = torch.tensor

    def tensor(data: Any, **options: Any) -> torch.Tensor:
        # DTensor passes a number for each row of a cut parameter, which need not be looked at one by one.
        if isinstance(data, (list, tuple)) and not {*map(type, data)} <= {int, float, bool}:
            data = tree_map_only(FakeTensor, lambda tensor: tensor.item(), data)
        return of_torch(data, **options)

    def formatted(tensor: FakeTensor, spec: str) -> str:
        return format(tensor.item(), spec) if tensor.dim() == 0 else str(tensor)

    with patch.object(torch, "tensor", tensor), patch.object(FakeTensor, "__format__", formatted):
        yield

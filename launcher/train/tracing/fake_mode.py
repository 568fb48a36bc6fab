"""torch's mode for fake tensors, with a faster lookup of cached results and with known integers.

FakeTensorMode caches the results of an operator by the metadata of its arguments. Its keys also cover
symbolic shapes, sparse tensors and graphs, and took a third of the time of a trace.

FakeTensorMode also computes with the values of small constants. With `knows_integers`, these are all integers
and booleans of the batch and what is computed from them alone, so that code may read lengths, masks and
targets. This takes longer, so a trace first tries without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

import torch
import torch._subclasses.fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

_CONSTANTS = frozenset(
    (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)

_torch: Any = torch._subclasses.fake_tensor
_HAS_PRIVATE_PARTS = hasattr(FakeTensorMode, "_output_from_cache_entry") and hasattr(
    _torch, "_DispatchCacheValidEntry"
)
"Whether this torch has the private parts of torch 2.13 that TraceMode uses."

LARGEST_KNOWN = 2**20
"Maximum number of elements of a tensor whose values are known. Larger ones take long to compute with."

_aten = torch.ops.aten
_FACTORIES = frozenset(
    (
        *(_aten.arange.default, _aten.arange.start, _aten.arange.start_step),
        *(_aten.zeros.default, _aten.ones.default, _aten.full.default),
    )
)
"Operators that create a tensor from Python numbers alone."

_NO_SYMBOLS: Any = None
"In place of torch's key, which only symbolic shapes read."


class TraceMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """FakeTensorMode that looks up the results for ordinary arguments by its own key."""

    def __init__(self, *, knows_integers: bool = False) -> None:
        super().__init__()
        self.knows_integers = knows_integers

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

    def _cached_dispatch_impl(
        self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
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
            return self._output_from_cache_entry(state, entry, _NO_SYMBOLS, func, args)
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


@contextmanager
def lists_of_known_numbers() -> Iterator[None]:
    """Let torch.tensor take lists that contain fake tensors with known numbers. torch's own function reads
    the memory of such tensors, which fake ones do not have."""
    of_torch = torch.tensor

    def tensor(data: Any, **options: Any) -> torch.Tensor:
        if isinstance(data, (list, tuple)):
            data = tree_map_only(FakeTensor, lambda tensor: tensor.item(), data)
        return of_torch(data, **options)

    with patch.object(torch, "tensor", tensor):
        yield

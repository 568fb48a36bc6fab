"""torch's mode for fake tensors, with a faster lookup of cached results.

FakeTensorMode caches the results of an operator by the metadata of its arguments. Its keys also cover
symbolic shapes, sparse tensors and graphs, and took a third of the time of a trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch._subclasses.fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_CONSTANTS = frozenset(
    (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)

_torch: Any = torch._subclasses.fake_tensor
_HAS_PRIVATE_PARTS = hasattr(FakeTensorMode, "_output_from_cache_entry") and hasattr(
    _torch, "_DispatchCacheValidEntry"
)
"Whether this torch has the private parts of torch 2.13 that TraceMode uses."

_NO_SYMBOLS: Any = None
"In place of torch's key, which only symbolic shapes read."


class TraceMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """FakeTensorMode that looks up the results for ordinary arguments by its own key."""

    _entries: dict[tuple[Any, ...], Any] = {}
    "(operator, arguments) -> torch's entry, for all instances. Only results that torch caches have one."

    def _cached_dispatch_impl(
        self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
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

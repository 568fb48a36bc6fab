"""Share the copies that autograd keeps of tensors, such as copies in host memory or in 8 bits."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class CopiedOnce:
    """Makes one copy of a tensor for all operators that save it, in all blocks.

    A copy lives as long as autograd keeps it. It is reused as long as the memory of its tensor lives.
    """

    def __init__(self) -> None:
        self._copies: weakref.WeakKeyDictionary[Any, weakref.WeakValueDictionary[Hashable, Any]] = (
            weakref.WeakKeyDictionary()
        )

    def __call__(self, tensor: torch.Tensor, view: Hashable, make: Callable[[], T]) -> T:
        """Return the existing copy of the tensor, or a new one from `make`.

        `view` identifies the elements, their order in memory, and the content by torch's version counters.
        """
        key = (view, tensor.storage_offset(), tensor.dtype, tensor.is_neg(), tensor.is_conj())
        storage = tensor.untyped_storage()
        if (copies := self._copies.get(storage)) is None:
            copies = self._copies[storage] = weakref.WeakValueDictionary()
        if (copy := copies.get(key)) is None:
            copy = copies[key] = make()
        return copy

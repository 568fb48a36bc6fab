"""Copies of tensors that autograd keeps, such as in host memory or in 8 bits."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class CopiedOnce:
    """Makes one copy of a tensor that several operators save, also in several blocks.

    A copy lives as long as autograd keeps it, and is known as long as the memory of its tensor lives.
    """

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Any, weakref.WeakValueDictionary[Hashable, Any]] = (
            weakref.WeakKeyDictionary()
        )

    def __call__(self, tensor: torch.Tensor, place: Hashable, make: Callable[[], T]) -> T:
        """Return the copy that `make` returns, or the one that it returned before.

        `place`: which part of the tensor's memory it is, in which order, and torch's version counter.
        """
        place = (place, tensor.storage_offset(), tensor.dtype, tensor.is_neg(), tensor.is_conj())
        storage = tensor.untyped_storage()
        if (known := self._known.get(storage)) is None:
            known = self._known[storage] = weakref.WeakValueDictionary()
        if (found := known.get(place)) is None:
            found = known[place] = make()
        return found

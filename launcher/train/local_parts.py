"""The part that this rank has of a tensor that a block saves for its backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or of a DTensor this rank's part, after the collective that computes it. Use
    `torch.no_grad()`."""
    part = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return part.wait() if isinstance(part, AsyncCollectiveTensor) else part


def memory_of(tensor: torch.Tensor) -> int:
    """Return the address of the storage of a tensor, or of a DTensor's part; 0 for a wrapper of tensors."""
    part: Any = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return 0 if is_traceable_wrapper_subclass(part) else int(part.untyped_storage()._cdata)


def saved_parts(
    pack: Callable[[torch.Tensor, torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
) -> saved_tensors_hooks:
    """Return hooks for saved tensors. `pack` gets the tensor and its `local_part`; what `unpack` returns for
    a DTensor is its part again."""

    def pack_part(tensor: torch.Tensor) -> tuple[Any, Any]:
        return (tensor._spec if isinstance(tensor, DTensor) else None), pack(tensor, local_part(tensor))

    def unpack_part(saved: tuple[Any, Any]) -> torch.Tensor:
        spec, packed = saved
        found = unpack(packed)
        if spec is None or isinstance(found, DTensor):
            return found
        return DTensor(found, spec, requires_grad=False)  # type: ignore[no-untyped-call]

    return saved_tensors_hooks(pack_part, unpack_part)

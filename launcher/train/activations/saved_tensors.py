"""The local part of a tensor that a block saves for its backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from launcher.train.task import TaskError


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor; for a DTensor, this rank's part. Waits for a collective that computes it. Call this
    under `torch.no_grad()`."""
    part = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return part.wait() if isinstance(part, AsyncCollectiveTensor) else part


def memory_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage; for a DTensor, of its local part. Return 0 for a wrapper of
    tensors and for a sparse tensor."""
    part: Any = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if part.layout != torch.strided or is_traceable_wrapper_subclass(part):
        return 0
    return int(part.untyped_storage()._cdata)


def check_no_transform(what: str) -> None:
    """Raise TaskError if a block is called within a transform of torch.func, whose tensors have no memory."""
    if torch.is_grad_enabled() and torch._C._are_functorch_transforms_active():
        raise TaskError(
            f"activations cannot be {what} where the model calls its blocks within torch.func (vmap, jvp, "
            "grad): use activations: keep or offload"
        )


class _Kept(NamedTuple):
    """A saved tensor that stays as it is, and its version when it was saved."""

    tensor: torch.Tensor
    version: int

    def unchanged(self) -> torch.Tensor:
        """Return the tensor. Autograd leaves this check to hooks."""
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self.tensor.shape)} that the backward pass needs has been "
                f"modified by an inplace operation: it is at version {self.tensor._version}, "
                f"expected {self.version}"
            )
        return self.tensor


def saved_parts(
    pack: Callable[[torch.Tensor, torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
) -> saved_tensors_hooks:
    """Return hooks for saved tensors.

    `pack` gets the tensor and its `local_part`, and returns what to keep instead, or None to keep the tensor.
    For a DTensor, `unpack` returns the local part. As without hooks, the backward pass raises RuntimeError if
    a tensor that was kept has changed.
    """

    def pack_part(tensor: torch.Tensor) -> tuple[Any, Any]:
        packed = pack(tensor, local_part(tensor))
        if packed is None:
            return None, _Kept(tensor, tensor._version)
        return (tensor._spec if isinstance(tensor, DTensor) else None), packed

    def unpack_part(saved: tuple[Any, Any]) -> torch.Tensor:
        spec, packed = saved
        if isinstance(packed, _Kept):
            return packed.unchanged()
        part = unpack(packed)
        return part if spec is None else DTensor(part, spec, requires_grad=False)  # type: ignore[no-untyped-call]

    return saved_tensors_hooks(pack_part, unpack_part)

"""The gradient memory of DistributedDataParallel, reproduced in a backward pass without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only


@contextmanager
def as_in_buckets(model: DistributedDataParallel, *, reduced: bool) -> Iterator[None]:
    """Run one micro-batch on `model.module` with the memory that DDP would use. DDP's own hooks stay idle.

    The buckets already exist. If gradients are `reduced` in this micro-batch, DDP copies each gradient into
    its bucket and frees it.
    """
    hooks: list[Any] = []
    if reduced:
        trained = (p for p in model.parameters() if p.requires_grad)
        hooks += [p.register_post_accumulate_grad_hook(_drop) for p in trained]  # type: ignore[no-untyped-call]
    if model.find_unused_parameters:
        hooks.append(model.module.register_forward_hook(_copied))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def bytes_of_new_buckets(model: DistributedDataParallel) -> int:
    """Return the bytes of the buckets that DDP is still going to rebuild, or 0.

    DDP rebuilds its buckets once, in its second forward pass, in the order in which gradients arrived. The
    old buckets then still hold the gradients of the first micro-batch of the same step."""
    if model.find_unused_parameters or getattr(model, "_has_rebuilt_buckets", False):
        return 0
    return sum(p.nbytes for p in model.parameters() if p.requires_grad)


def _drop(p: torch.Tensor) -> None:
    p.grad = None


def _copied(_: nn.Module, __: Any, outputs: Any) -> Any:
    """Return a copy of the outputs, as DDP does with `find_unused_parameters`."""
    return tree_map_only(torch.Tensor, lambda t: t.clone() if t.grad_fn is not None else t, outputs)

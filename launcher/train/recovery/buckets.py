"""Gradients in memory as DistributedDataParallel has them, for a backward pass without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only


@contextmanager
def as_in_buckets(model: DistributedDataParallel, *, met: bool) -> Iterator[None]:
    """Around one micro-batch on `model.module`, on whose parameters DDP's hooks stay idle.

    The buckets exist from the beginning. Where gradients are `met`, DDP copies each into them and drops it.
    """
    hooks: list[Any] = []
    if met:
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
    """In the second forward pass that it sees, DDP makes its buckets anew, in the order in which gradients
    came. Those of the first micro-batch of the same step are then still in the old ones."""
    if model.find_unused_parameters or getattr(model, "_has_rebuilt_buckets", False):
        return 0
    return sum(p.nbytes for p in model.parameters() if p.requires_grad)


def _drop(p: torch.Tensor) -> None:
    p.grad = None


def _copied(_: nn.Module, __: Any, outputs: Any) -> Any:
    """DDP returns copies where it looks for unused parameters."""
    return tree_map_only(torch.Tensor, lambda t: t.clone() if t.grad_fn is not None else t, outputs)

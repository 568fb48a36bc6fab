"""Cross-entropy in chunks, so that the logits of a large vocabulary never exist as a whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Head = Callable[[torch.Tensor], torch.Tensor]


def chunked_cross_entropy(
    hidden: torch.Tensor, head: Head, targets: torch.Tensor, chunks: int, ignore_index: int = -100
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the cross-entropies and their number, without targets equal to `ignore_index`.

    `hidden` is (..., dim), `targets` (...), `head` a module or function (n, dim) -> (n, vocabulary).
    The tokens are divided into `chunks` parts, and the backward pass recomputes the logits of each part, so
    that only one part's logits exist at a time: about 12 bytes x tokens x vocabulary / chunks in fp32. With
    1 chunk all logits are computed once.

    Call this inside the model's `forward`, where FSDP gathers the head's weight. Pass the head itself if it
    is a module: an FSDP unit is then gathered once for all parts. If you pass a function that calls the head,
    it is gathered, and its gradient is reduced, for every part.
    """
    hidden, targets = hidden.flatten(0, -2), targets.flatten()
    weight = (targets != ignore_index).sum()
    if chunks == 1:
        return _sum_of(head, hidden, targets, ignore_index), weight

    def in_parts(head: Head, hidden: torch.Tensor) -> torch.Tensor:
        # Every rank makes exactly `chunks` parts, even empty ones: with FSDP a call of the head can be a
        # collective.
        parts = zip(hidden.tensor_split(chunks), targets.tensor_split(chunks), strict=True)
        sums = [
            checkpoint(_sum_of, head, some, theirs, ignore_index, use_reentrant=False)
            for some, theirs in parts
        ]
        return torch.stack(sums).sum()

    if isinstance(head, nn.Module) and isinstance(head, FSDPModule):
        return _within(head, in_parts, hidden), weight
    return in_parts(head, hidden), weight


def _sum_of(head: Head, hidden: torch.Tensor, targets: torch.Tensor, ignore_index: int) -> torch.Tensor:
    logits = head(hidden).float()
    return functional.cross_entropy(logits, targets, reduction="sum", ignore_index=ignore_index)


def _within(
    unit: nn.Module, compute: Callable[[Head, torch.Tensor], torch.Tensor], hidden: torch.Tensor
) -> torch.Tensor:
    """Return `compute(forward, hidden)` with the forward of an FSDP unit, as one call of the unit.

    FSDP gathers a unit around each call of the module, so `compute` stands in for its forward.
    """
    own, forward = unit.__dict__.get("forward"), unit.forward
    unit.forward = partial(compute, forward)
    try:
        total: torch.Tensor = unit(hidden)
        return total
    finally:
        if own is None:
            del unit.forward
        else:
            unit.forward = own

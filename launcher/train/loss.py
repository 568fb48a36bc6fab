"""Cross-entropy in chunks, so that the logits of a large vocabulary never exist as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from launcher.train.tensor import vocabulary_parallel

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
    weight = (targets != ignore_index).sum()
    if isinstance(head, nn.Module) and isinstance(head, FSDPModule) and chunks > 1:
        with loss_in_place_of_logits(head, targets, chunks, ignore_index):
            return head(hidden), weight
    return _in_parts(head, hidden, targets, chunks, ignore_index), weight


@contextmanager
def loss_in_place_of_logits(
    head: nn.Module, targets: torch.Tensor, chunks: int, ignore_index: int = -100
) -> Iterator[None]:
    """Make a call of `head` return the sum of the cross-entropies, computed in parts, instead of logits.

    For a model that calls its output layer itself and returns the result unchanged. Hooks of the layer, such
    as FSDP's, run once around all parts.
    """
    instance_forward, forward = head.__dict__.get("forward"), head.forward

    def loss(hidden: torch.Tensor) -> torch.Tensor:
        return _in_parts(forward, hidden, targets, chunks, ignore_index)

    head.forward = loss
    try:
        yield
    finally:
        if instance_forward is None:
            del head.forward
        else:
            head.forward = instance_forward


def _in_parts(
    head: Head, hidden: torch.Tensor, targets: torch.Tensor, chunks: int, ignore_index: int
) -> torch.Tensor:
    hidden, targets = hidden.flatten(0, -2), targets.flatten()
    if chunks == 1:
        return _sum_of(head, hidden, targets, ignore_index)
    # Every rank makes exactly `chunks` parts, even empty ones: with FSDP a call of the head can be a
    # collective.
    parts = zip(hidden.tensor_split(chunks), targets.tensor_split(chunks), strict=True)
    sums = [
        checkpoint(_sum_of, head, part, part_targets, ignore_index, use_reentrant=False)
        for part, part_targets in parts
    ]
    return torch.stack(sums).sum()


def _sum_of(head: Head, hidden: torch.Tensor, targets: torch.Tensor, ignore_index: int) -> torch.Tensor:
    return cross_entropy(head(hidden), targets, ignore_index)


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """Return the sum of the cross-entropies in fp32, also of logits that VocabularyParallel has cut.

    `logits` is (n, vocabulary), `targets` (n,).
    """
    if isinstance(logits, DTensor):
        if not logits.placements[0].is_replicate():
            return vocabulary_parallel.cross_entropy(logits, targets, ignore_index)
        logits = logits.to_local()
    return functional.cross_entropy(logits.float(), targets, reduction="sum", ignore_index=ignore_index)

"""Cross-entropy in chunks, so that the logits of a large vocabulary never exist as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from launcher.train.tensor import vocabulary_parallel
from launcher.train.tensor_parallel import linear

Head = Callable[[torch.Tensor], torch.Tensor]
_HOOKS_OF_OUTPUTS = ("_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def chunked_cross_entropy(
    hidden: torch.Tensor,
    head: Head | torch.Tensor,
    targets: torch.Tensor,
    chunks: int,
    ignore_index: int = -100,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the cross-entropies and their number, without targets equal to `ignore_index`.

    `hidden` is (..., dim), `targets` (...), `head` a module or function (n, dim) -> (n, vocabulary), or the
    weight (vocabulary, dim) of a linear layer. The tokens are divided into `chunks` parts, and the backward
    pass recomputes the logits of each part, so that only one part's logits exist at a time: at most 6 bytes x
    tokens x vocabulary / chunks for a weight or an `nn.Linear`, whose gradient exists once; 12 bytes and two
    gradients for another head. With 1 chunk all logits are computed once.

    Call this inside the model's `forward`, where FSDP gathers the head's weight. Pass the head itself if it
    is a module: an FSDP unit is then gathered once for all parts. If you pass a function that calls the head,
    it is gathered, and its gradient is reduced, for every part.
    """
    weight = (targets != ignore_index).sum()
    if chunks > 1 and isinstance(head, nn.Module) and _may_return_loss(head):
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
    head: Head | torch.Tensor, hidden: torch.Tensor, targets: torch.Tensor, chunks: int, ignore_index: int
) -> torch.Tensor:
    hidden, targets = hidden.flatten(0, -2), targets.flatten()
    weight, bias = _linear_parameters(head)
    if chunks > 1 and weight is not None and not isinstance(weight, DTensor):
        return _linear_in_parts(hidden, weight, bias, targets, chunks, ignore_index)
    if isinstance(head, torch.Tensor):
        head = partial(linear, weight=head)
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


def _may_return_loss(head: nn.Module) -> bool:
    """Return whether no hook of the user's or of a tensor-parallel style needs the logits."""
    return isinstance(head, FSDPModule) or not any(getattr(head, hooks) for hooks in _HOOKS_OF_OUTPUTS)


def _linear_parameters(head: Head | torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return weight and bias of a head that is only a linear layer, else (None, None)."""
    if isinstance(head, torch.Tensor):
        return head, None
    if isinstance(head, MethodType) and head.__func__ is nn.Linear.forward:
        layer: Any = head.__self__
        return layer.weight, layer.bias
    return None, None


def _linear_in_parts(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    chunks: int,
    ignore_index: int,
) -> torch.Tensor:
    device = hidden.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)  # autocast does not reach the backward pass
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    total: torch.Tensor = _LinearCrossEntropy.apply(hidden, weight, bias, targets, chunks, ignore_index)  # type: ignore[no-untyped-call]
    return total


class _LinearCrossEntropy(torch.autograd.Function):
    """The cross-entropy of `linear(hidden, weight, bias)`; the backward pass computes the logits again.

    autograd would hold the weight's gradient of one part beside the sum of the others. Here each part's
    matrix product adds to the sum. A part has its logits in fp32 and, at most, in the type of the weight.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        chunks: int,
        ignore_index: int,
    ) -> torch.Tensor:
        sums, normalizers = [], []
        parts = zip(hidden.tensor_split(chunks), targets.tensor_split(chunks), strict=True)
        for part, part_targets in parts:
            values = functional.linear(part, weight, bias).float()
            largest = values.amax(dim=1, keepdim=True)
            values.sub_(largest)
            sums.append(functional.nll_loss(values, part_targets, ignore_index=ignore_index, reduction="sum"))
            normalizer = values.exp_().sum(dim=1, keepdim=True).log_()
            del values
            sums.append(normalizer.masked_fill((part_targets == ignore_index)[:, None], 0.0).sum())
            normalizers.append(normalizer.add_(largest))
        ctx.save_for_backward(hidden, weight, bias, targets, torch.cat(normalizers))
        ctx.chunks, ctx.ignore_index = chunks, ignore_index
        return torch.stack(sums).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, normalizers = ctx.saved_tensors
        of_hidden, of_weight, of_bias = (
            torch.zeros_like(tensor) if needed else None
            for tensor, needed in zip((hidden, weight, bias), ctx.needs_input_grad[:3], strict=True)
        )
        kept = targets != ctx.ignore_index
        # The gradient of the logits is (softmax - one-hot) x scale.
        scale, target = (gradient * kept)[:, None], targets.where(kept, 0)[:, None]
        end = 0
        for part in hidden.tensor_split(ctx.chunks):
            rows = slice(end, end := end + len(part))
            values = functional.linear(part, weight, bias).float()
            values.sub_(normalizers[rows]).exp_().mul_(scale[rows])
            values.scatter_(1, target[rows], values.gather(1, target[rows]) - scale[rows])
            values = values.to(weight.dtype)
            if of_hidden is not None:
                torch.mm(values, weight, out=of_hidden[rows])
            if of_weight is not None:
                of_weight.addmm_(values.T, part)
            if of_bias is not None:
                of_bias += values.sum(dim=0)
            del values
        return of_hidden, of_weight, of_bias, None, None, None


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

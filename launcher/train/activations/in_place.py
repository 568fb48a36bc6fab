"""Tensors that a model may change in place, such as with `nn.ReLU(inplace=True)`.

Autograd refuses that for leaves, such as what a stage receives, and for views that a function with its own
backward pass returns, such as the values of a DTensor.
"""

from __future__ import annotations

from typing import Any

import torch


class _Alias(torch.autograd.Function):
    """The same memory: without history, `detach` returns what is not a view to autograd."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def changeable(x: torch.Tensor) -> torch.Tensor:
    """Return x as a tensor of the same memory that may be changed in place. As everywhere, the backward pass
    fails if it reads the old values."""
    result: torch.Tensor = _Alias.apply(x)  # type: ignore[no-untyped-call]
    return result

"""Tensors that a model may change in place, such as with `nn.ReLU(inplace=True)`.

Autograd raises an error if a model changes in place a leaf, such as a tensor that a pipeline stage receives,
or a view that a custom autograd function returns, such as the local part of a DTensor.
"""

from __future__ import annotations

from typing import Any

import torch


class _Alias(torch.autograd.Function):
    """An alias of a tensor. It is not a view for autograd, because `detach` runs here without history."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def changeable(x: torch.Tensor) -> torch.Tensor:
    """Return an alias of x that may be changed in place. As with any tensor, the backward pass fails if it
    needs the old values."""
    result: torch.Tensor = _Alias.apply(x)  # type: ignore[no-untyped-call]
    return result

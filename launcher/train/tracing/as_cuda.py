"""Replacements for functions that save other tensors on the CPU than on a GPU.

Tensors of a trace are fake CPU tensors: without CUDA, torch aborts for CUDA tensors. A few functions save
different tensors for the backward pass on the CPU. Within `as_cuda()` they are replaced by functions with the
memory of the CUDA kernel. A dispatch mode would not work: it is off inside its own handler, so recomputed
blocks would use the CPU's functions again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor, Partial
from torch.nn import functional

aten = torch.ops.aten
LARGEST_HEAD = 256
"Largest head dimension with flash attention: ATen/native/transformers/cuda/sdp_utils.cpp."


@contextmanager
def as_cuda() -> Iterator[None]:
    """Save the tensors that CUDA kernels save."""
    with patch.multiple(functional, **_REPLACED):
        yield


@contextmanager
def as_compiled() -> Iterator[None]:
    """Undo what as_cuda() does to functions that torch.compile takes apart itself."""
    with patch.object(functional, "rms_norm", _NATIVE_RMS_NORM):
        yield


class _FusedRmsNorm(torch.autograd.Function):
    """RMS norm that, like CUDA's fused kernel, saves its input, the weight and one fp32 number per row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, dims: int) -> torch.Tensor:
        rows = torch.empty(x.shape[:-dims] + (1,) * dims, dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, rows)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None


def _rms_norm(
    input: torch.Tensor,
    normalized_shape: list[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> Any:
    dims = len(normalized_shape)
    if not isinstance(input, DTensor):
        return _FusedRmsNorm.apply(input, weight, dims)  # type: ignore[no-untyped-call]
    if isinstance(weight, DTensor):
        weight = weight.to_local(grad_placements=[Partial()] * input.device_mesh.ndim)
    out = _FusedRmsNorm.apply(input.to_local(), weight, dims)  # type: ignore[no-untyped-call]
    return DTensor.from_local(out, input.device_mesh, input.placements)


def _dropout(of_cpu: Callable[..., Any]) -> Callable[..., Any]:
    def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        """Dropout with a mask of one byte per element; the CPU's mask has the input's type."""
        if training and p > 0 and not inplace:
            return torch.native_dropout(input, p, True)[0]
        return of_cpu(input, p, training, inplace)

    return dropout


def _attention(of_cpu: Callable[..., Any]) -> Callable[..., Any]:
    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        """Flash attention in 16 bit without a mask, else memory-efficient attention. Neither saves scores."""
        options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
        if query.dim() != 4 or query.shape[-1] > LARGEST_HEAD:
            return of_cpu(query, key, value, attn_mask, enable_gqa=enable_gqa, **options)
        if attn_mask is None and query.dtype in (torch.bfloat16, torch.float16):
            return aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, scale=scale
            )[0]
        if enable_gqa and (groups := query.shape[1] // key.shape[1]) > 1:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:  # the kernel needs a mask that is added to the scores
                attn_mask = torch.empty_like(attn_mask, dtype=query.dtype)
            attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
        )[0]

    return attention


_NATIVE_RMS_NORM = functional.rms_norm
_REPLACED: dict[str, Any] = {
    "rms_norm": _rms_norm,
    "dropout": _dropout(functional.dropout),
    "scaled_dot_product_attention": _attention(functional.scaled_dot_product_attention),
}
"Made once: torch.compile compiles another graph for another function object."

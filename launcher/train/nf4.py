"""Linear layers with a frozen weight in 4 bits: NF4 with double quantization (arXiv 2305.14314).

bitsandbytes' own `Params4bit` keeps the scales beside the parameter, where FSDP2 loses them. Here one flat
parameter holds everything: codes, scales, and the numbers that decode the scales. FSDP can cut it anywhere
and gathers it packed; the layer decodes the weight when it computes, and again in the backward pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from launcher.train.optimizers.local_shards import bitsandbytes
from launcher.train.optimizers.state import local, slices_of

BLOCK = 64
"Weights that share a scale: bitsandbytes' default."
SCALES_BLOCK = 256
"Scales that share a scale of their own. Fixed by bitsandbytes for double quantization."
TABLE = 256
"Values that the code of a scale can stand for."
FP32 = 4


@dataclass(frozen=True)
class Packing:
    """Where each part of a packed weight of shape (out, in) begins, in bytes.

    The order is: codes, scales, a gap to a multiple of 4, then in fp32 the scales of the scales, the mean of
    the scales, and the table of their codes.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    "Type of the decoded weight. The packed parameter has it too, so that FSDP's mixed precision leaves it."

    @cached_property
    def codes(self) -> int:
        return math.ceil(math.prod(self.shape) / 2)

    @cached_property
    def scales(self) -> int:
        return math.ceil(math.prod(self.shape) / BLOCK)

    @cached_property
    def numbers_at(self) -> int:
        return math.ceil((self.codes + self.scales) / FP32) * FP32

    @cached_property
    def outer_scales(self) -> int:
        return math.ceil(self.scales / SCALES_BLOCK)

    @cached_property
    def elements(self) -> int:
        """Length of the packed parameter."""
        return (self.numbers_at + FP32 * (self.outer_scales + 1 + TABLE)) // self.dtype.itemsize

    @torch.no_grad()
    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Return `weight` in 4 bits, as a tensor of `elements` numbers of `dtype`."""
        codes, state = bitsandbytes().quantize_4bit(
            weight.to(self.dtype).contiguous(), blocksize=BLOCK, compress_statistics=True, quant_type="nf4"
        )
        numbers = torch.cat([state.state2.absmax, state.offset.view(1), state.state2.code]).float()
        gap = codes.new_zeros(self.numbers_at - self.codes - self.scales)
        parts = [codes.flatten(), state.absmax, gap, numbers.view(torch.uint8)]
        return torch.cat(parts).view(self.dtype)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """Return the weight (out, in) in `dtype`."""
        data = packed.view(torch.uint8)
        codes, scales = data[: self.codes], data[self.codes : self.codes + self.scales]
        numbers = data[self.numbers_at :].view(torch.float32)
        outer, mean, table = torch.split(numbers, [self.outer_scales, 1, TABLE])
        operators = torch.ops.bitsandbytes
        inner = operators.dequantize_blockwise(scales, outer, table, SCALES_BLOCK, torch.float32) + mean
        decoded: torch.Tensor = operators.dequantize_4bit(
            codes.unsqueeze(1), inner, BLOCK, "nf4", list(self.shape), self.dtype
        )
        return decoded


class NF4Linear(nn.Linear):
    """A linear layer whose frozen weight is packed. `weight` is flat, with `packing.elements` numbers."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        """Pack the weight of `linear`, which may be on the meta device. Raises SetupError without
        bitsandbytes."""
        nn.Module.__init__(self)
        bitsandbytes()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packing = packing = Packing((self.out_features, self.in_features), dtype)
        on_meta = linear.weight.is_meta
        packed = (
            torch.empty(packing.elements, dtype=dtype, device="meta")
            if on_meta
            else packing.pack(linear.weight)
        )
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        y: torch.Tensor = _Product.apply(x.to(self.packing.dtype), self.weight, self.packing)  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias.to(y.dtype)

    @torch.no_grad()
    def fill(self, weight: torch.Tensor) -> None:
        """Pack `weight`, the whole one, and copy this rank's part."""
        local(self.weight).copy_(self.packing.pack(weight)[slices_of(self.weight)])


class _Product(torch.autograd.Function):
    """x W' that keeps the packed weight for the backward pass, not the decoded one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, packing: Packing) -> torch.Tensor:
        ctx.save_for_backward(packed)
        ctx.packing = packing
        return functional.linear(x, packing.unpack(packed))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (packed,) = ctx.saved_tensors
        return gradient @ ctx.packing.unpack(packed), None, None

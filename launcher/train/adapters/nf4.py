"""Linear layers with a frozen weight in 4 bits: NF4 with double quantization (arXiv 2305.14314).

bitsandbytes' own `Params4bit` keeps the scales outside the parameter, where FSDP2 loses them. Here one flat
parameter holds everything: codes, scales, and the numbers that decode the scales. FSDP can cut it anywhere
and gathers it packed; the layer decodes the weight when it computes, and again in the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional

from launcher.train.local_shards import from_part, local, slices_of
from launcher.train.optimizers.eight_bit import bitsandbytes

BLOCK = 64
"Weights that share a scale: bitsandbytes' default."
SCALES_BLOCK = 256
"Scales that share a scale of their own. Fixed by bitsandbytes for double quantization."
TABLE = 256
"Number of entries in the table that decodes the scales."
FP32 = 4


def _bitsandbytes() -> Any:
    return bitsandbytes("adapter.kind: qlora", "kind: lora")


@dataclass(frozen=True)
class Packing:
    """Layout of a packed weight of shape (out, in): offsets and sizes in bytes.

    The order is: codes, scales, a gap to a multiple of 4, then in fp32 the scales of the scales, the mean of
    the scales, and the table of their codes.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    "Type of the decoded weight. The packed parameter has it too, so that FSDP's mixed precision leaves it."

    @property
    def codes(self) -> int:
        return math.ceil(math.prod(self.shape) / 2)

    @property
    def scales(self) -> int:
        return math.ceil(math.prod(self.shape) / BLOCK)

    @property
    def numbers_at(self) -> int:
        return math.ceil((self.codes + self.scales) / FP32) * FP32

    @property
    def outer_scales(self) -> int:
        return math.ceil(self.scales / SCALES_BLOCK)

    @property
    def elements(self) -> int:
        """Length of the packed parameter."""
        return (self.numbers_at + FP32 * (self.outer_scales + 1 + TABLE)) // self.dtype.itemsize

    @torch.no_grad()
    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Return `weight` in 4 bits, as a tensor of `elements` numbers of `dtype`."""
        codes, state = _bitsandbytes().quantize_4bit(
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
        inner = self._decoded(scales, outer, table) + mean
        # One row per block: bitsandbytes 0.50 decodes on the CPU as if each row began with a scale.
        if missing := self.scales * BLOCK // 2 - self.codes:
            codes = functional.pad(codes, (0, missing))
        decoded: torch.Tensor = torch.ops.bitsandbytes.dequantize_4bit(
            codes.unsqueeze(1), inner, BLOCK, "nf4", [self.scales, BLOCK], self.dtype
        )
        return decoded.view(-1)[: math.prod(self.shape)].view(self.shape)

    def _decoded(self, scales: torch.Tensor, outer: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Return the scales without their mean."""
        decoded: torch.Tensor = torch.ops.bitsandbytes.dequantize_blockwise(
            scales, outer, table, SCALES_BLOCK, torch.float32
        )
        return decoded


@dataclass(frozen=True)
class PackedPart(Packing):
    """Layout of some rows or columns of a packed weight: whole blocks with their scales, and all numbers that
    decode the scales of the whole weight, so that the part decodes to the same values."""

    whole: Packing
    rows: slice
    columns: slice

    @staticmethod
    def of(whole: Packing, rows: slice, columns: slice) -> PackedPart | None:
        """Return the packing of a part, or None if it does not consist of whole blocks."""
        part = PackedPart(
            (rows.stop - rows.start, columns.stop - columns.start), whole.dtype, whole, rows, columns
        )
        across = whole.shape[1]
        ends = [rows.start * across, rows.stop * across]
        if part._cuts_rows:
            ends = [across, columns.start, columns.stop]
        return None if any(end % BLOCK for end in ends) or not math.prod(part.shape) else part

    @property
    def _cuts_rows(self) -> bool:
        return self.shape[1] < self.whole.shape[1]

    @property
    def outer_scales(self) -> int:
        return self.whole.outer_scales

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Return this part of the whole `weight` in 4 bits."""
        return self.cut(self.whole.pack(weight))

    @torch.no_grad()
    def cut(self, packed: torch.Tensor) -> torch.Tensor:
        """Return this part of the whole packed weight."""
        data, whole = packed.view(torch.uint8), self.whole
        codes = self._select(data[: whole.codes], 2)
        scales = self._select(data[whole.codes : whole.codes + whole.scales], BLOCK)
        gap = data.new_zeros(self.numbers_at - self.codes - self.scales)
        return torch.cat([codes, scales, gap, data[whole.numbers_at :]]).view(self.dtype)

    def _select(self, values: torch.Tensor, weights: int) -> torch.Tensor:
        """Return this part's entries of `values`, which has one entry per `weights` elements of the whole."""
        rows, across = self.whole.shape
        if self._cuts_rows:
            columns = slice(self.columns.start // weights, self.columns.stop // weights)
            return values.view(rows, across // weights)[self.rows, columns].flatten()
        return values[self.rows.start * across // weights : self.rows.stop * across // weights]

    def _decoded(self, scales: torch.Tensor, outer: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        across = self.whole.shape[1]
        if self._cuts_rows:
            first = torch.arange(self.rows.start, self.rows.stop, device=scales.device) * (across // BLOCK)
            within = torch.arange(self.columns.start, self.columns.stop, BLOCK, device=scales.device) // BLOCK
            places = (first[:, None] + within).flatten()
        else:
            start = self.rows.start * across // BLOCK
            places = torch.arange(start, start + self.scales, device=scales.device)
        return table[scales.int()] * outer[places // SCALES_BLOCK]


class NF4Linear(nn.Linear):
    """A linear layer whose frozen weight is the parameter `packed`, of `packing.elements` numbers."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        """Pack the weight of `linear`, which may be on the meta device. Raises SetupError without
        bitsandbytes."""
        nn.Module.__init__(self)
        _bitsandbytes()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packing: Packing
        self.packing = packing = Packing((self.out_features, self.in_features), dtype)
        self.placement: Placement = Replicate()
        "How tensor parallelism cuts the weight."
        on_meta = linear.weight.is_meta
        packed = (
            torch.empty(packing.elements, dtype=dtype, device="meta")
            if on_meta
            else packing.pack(linear.weight)
        )
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The decoded weight of shape (out, in), for code that uses it without calling the layer."""
        return self.packing.unpack(self.packed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        y = self._product(x.to(self.packing.dtype))
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, DTensor):
            gradients: Sequence[Placement] = x.placements
            placements = gradients
            if self.placement == Shard(0):  # each rank computes some of the outputs
                gradients, placements = (Partial(),), [Shard(x.ndim - 1)]
            elif self.placement == Shard(1):  # or a partial sum of each output
                placements = [Partial()]
            part = self._product(x.to_local(grad_placements=gradients))
            return from_part(part, x.device_mesh, placements, (*x.shape[:-1], self.out_features))
        y: torch.Tensor = _Product.apply(x, self.packed, self.packing)  # type: ignore[no-untyped-call]
        return y

    def cut(self, placement: Placement, rows: slice, columns: slice) -> bool:
        """Keep this part of the weight. Return False if it does not consist of whole blocks."""
        part = PackedPart.of(self.packing, rows, columns)
        if part is None:
            return False
        packed = (
            self.packed.new_empty(part.elements) if self.packed.is_meta else part.cut(self.packed.detach())
        )
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.packing, self.placement = part, placement
        return True

    @torch.no_grad()
    def fill(self, weight: torch.Tensor) -> None:
        """Pack the whole `weight` and copy this rank's part of it."""
        local(self.packed).copy_(self.packing.pack(weight)[slices_of(self.packed)])


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

"""Values that a rank uses for the shards of other ranks while it runs a step alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from launcher.train.local_shards import parameter_groups
from launcher.train.recovery.agreement import Agreement

WHOLE = 2**20
"Maximum bytes of a parameter whose real shards are used. For a larger one, this rank's shard is repeated."
SAMPLE = 2**12
"Bytes of a larger parameter that are sent to ranks that have none of its rows."


class Shape(NamedTuple):
    """The shard of one parameter in a rank's input to an all-gather."""

    offset: int
    size: int
    "Bytes with padding."
    own: int
    "Bytes of this rank's shard without padding."
    small: bool
    "The whole parameter has at most WHOLE bytes."


class Piece(NamedTuple):
    """One parameter with values for all ranks."""

    shape: Shape
    real: tuple[torch.Tensor, ...] | None
    "The shard of each rank, on the host; None for a large parameter."
    sample: torch.Tensor | None
    "Rows of another rank, for a large parameter of which this rank has no rows."


class OtherShards:
    """Plausible values for every all-gather of an FSDP2 model, without padding.

    A model may check its values: a scale must be positive, a probability not NaN. Parameters of up to 1 MiB
    therefore have their real values. A larger one is filled with this rank's rows, repeated, or with another
    rank's rows if this rank has none.
    """

    def __init__(self, model: nn.Module) -> None:
        self._root: Any = model
        self._groups: dict[Any, list[Any]] = {
            unit: parameter_groups(unit) for unit in model.modules() if isinstance(unit, FSDPModule)
        }
        self._pieces: dict[int, list[Piece]] = {}
        "Keyed by the id of FSDP's parameter group."

    @torch.no_grad()
    def collect(self, agreement: Agreement) -> None:
        """Exchange the current values. Every rank calls this at once, between two steps."""
        try:
            described = self._described()
        except (
            AttributeError
        ):  # another version of torch has other names: use this rank's shards for all ranks
            described = []
        answers = agreement.all_values([parts for _, _, parts in described])
        if len({len(parts) for parts in answers}) > 1:
            return
        for (group, shapes, _), of_ranks in zip(described, zip(*answers, strict=True), strict=True):
            members = dist.get_process_group_ranks(_shard_group(group))
            self._pieces[id(group)] = list(_pieces(shapes, [of_ranks[number] for number in members]))

    def _described(self) -> list[tuple[Any, list[Shape], list[torch.Tensor | None]]]:
        """Return each parameter group, its shapes, and the values that this rank sends to the others."""
        self._root._get_fsdp_state()._lazy_init()
        described = []
        for unit, groups in self._groups.items():
            unit.reshard()
            described += [(group, *_shards_of_group(group)) for group in groups]
        return described

    @torch.no_grad()
    def fill(self, unit: Any, output: torch.Tensor, own: torch.Tensor, rank: int, world: int) -> None:
        """Fill `output` like an all-gather of `own`. This rank's part is already in place."""
        others = [part for number, part in enumerate(output.chunk(world)) if number != rank]
        torch._foreach_copy_(others, [own] * len(others))
        size = own.numel() * own.element_size()
        for group in self._groups[unit]:
            pieces = self._pieces.get(id(group))
            if pieces is not None and sum(piece.shape.size for piece in pieces) == size:
                rows, own_bytes = output.view(torch.uint8).view(world, size), own.view(torch.uint8)
                for piece in pieces:
                    end = piece.shape.offset + piece.shape.size
                    for number in range(world):
                        if number != rank:
                            _write(rows[number, piece.shape.offset : end], piece, number, own_bytes)
                return


def _shards_of_group(group: Any) -> tuple[list[Shape], list[torch.Tensor | None]]:
    shapes: list[Shape] = []
    parts: list[torch.Tensor | None] = []
    world, offset = _shard_group(group).size(), 0
    for parameter in group.fsdp_params:
        whole, part = parameter.sharded_param.shape, parameter.sharded_param.to_local()
        inputs = [one.view(torch.uint8) for one in parameter.all_gather_inputs]
        padded = inputs[0] if len(inputs) == 1 else torch.cat(inputs)
        own = padded.numel() * part.numel() // max(1, parameter.padded_sharded_param_size.numel())
        shape = Shape(offset, padded.numel(), own, padded.numel() * world <= WHOLE)
        last_is_empty = (world - 1) * -(-whole[0] // world) >= whole[0]
        kept = padded if shape.small else padded[: min(own, SAMPLE)] if last_is_empty else None
        shapes.append(shape)
        parts.append(None if kept is None else kept.to("cpu", copy=True))
        offset += shape.size
    return shapes, parts


def _pieces(shapes: list[Shape], of_ranks: list[list[torch.Tensor]]) -> Iterator[Piece]:
    for at, shape in enumerate(shapes):
        shards = [parts[at] for parts in of_ranks]
        samples = [part for part in shards if part is not None and part.numel()]
        yield Piece(shape, tuple(shards) if shape.small else None, samples[0] if samples else None)


def _write(target: torch.Tensor, piece: Piece, number: int, own_bytes: torch.Tensor) -> None:
    offset, size, own, _ = piece.shape
    if piece.real is not None:
        target.copy_(piece.real[number])
    elif own == 0 and piece.sample is not None:
        _repeat(piece.sample, target)
    elif 0 < own < size:
        _repeat(own_bytes[offset : offset + own], target)


def _repeat(source: torch.Tensor, target: torch.Tensor) -> None:
    length = source.numel()
    times = target.numel() // length
    target[: times * length].view(times, length).copy_(source)
    target[-length:].copy_(source)


def _shard_group(group: Any) -> dist.ProcessGroup:
    process_group: dist.ProcessGroup = group.mesh_info.shard_process_group
    return process_group

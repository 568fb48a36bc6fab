"""Messages from a stage to the next or the previous one: activations and gradients."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from launcher.train.local_shards import from_part, local, sharded_like
from launcher.train.rank import Rank

MOST_DIMENSIONS = 8
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
PLAIN, WHOLE = -2, -1
"Values of `Form.cut` for a plain tensor, and for a DTensor that each rank has whole."


def why_not_sent(result: Any) -> str | None:
    """Return what `result` is if `Channel.send_with_shape` cannot send it, or None if it can."""
    if not isinstance(result, torch.Tensor):
        return f"{type(result).__name__}, not a tensor"
    if result.dtype not in DTYPES:
        return f"a tensor of {result.dtype}, not of floats"
    if isinstance(result, DTensor) and not all(type(one) in (Shard, Replicate) for one in result.placements):
        return f"a DTensor placed as {result.placements}, where no rank has a part of the values"
    return f"a tensor of {result.ndim} dimensions" if result.ndim > MOST_DIMENSIONS else None


class Form(NamedTuple):
    """What the receiver of a tensor must know. If a tensor is cut over the tensor-parallel ranks, each rank
    sends its part to the rank that has the same part in the other stage."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    "The shape of the whole tensor."
    cut: int
    "The dimension in which it is cut, PLAIN or WHOLE."

    @staticmethod
    def of(tensor: torch.Tensor) -> Form:
        cut = PLAIN
        if isinstance(tensor, DTensor):
            [placement] = tensor.placements
            cut = placement.dim if isinstance(placement, Shard) else WHOLE
        return Form(tensor.dtype, tuple(tensor.shape), cut)

    @staticmethod
    def read(numbers: list[int]) -> Form:
        dtype, cut, dimensions, *shape = numbers
        return Form(DTYPES[dtype], tuple(shape[:dimensions]), cut)

    @property
    def numbers(self) -> list[int]:
        """`LENGTH` integers, from which `read` makes the form."""
        numbers = [DTYPES.index(self.dtype), self.cut, len(self.shape), *self.shape]
        return numbers + [0] * (LENGTH - len(numbers))

    def empty(self, device: torch.device, mesh: DeviceMesh | None) -> torch.Tensor:
        """Return a tensor of this form without values. `mesh`: the tensor-parallel ranks."""
        if self.cut == PLAIN:
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        assert mesh is not None
        placements = [Replicate() if self.cut == WHOLE else Shard(self.cut)]
        part_shape, _ = compute_local_shape_and_global_offset(self.shape, mesh, placements)
        part = torch.empty(part_shape, dtype=self.dtype, device=device)
        return from_part(part, mesh, placements, self.shape)


LENGTH = 3 + MOST_DIMENSIONS


class Channel:
    """Sends to one rank of the pipeline and receives from another one, in its own process group.

    NCCL runs the messages between two ranks of a group in the order of the calls: if both directions shared a
    group, a stage that sends an activation and one that sends a gradient would wait for each other.
    """

    def __init__(
        self,
        rank: Rank,
        group: dist.ProcessGroup,
        mesh: DeviceMesh | None,
        to: int | None,
        from_: int | None,
    ) -> None:
        """Connect the ranks; all of them must call this. `mesh`: the tensor-parallel ranks. `to`, `from_`:
        numbers in the group, or None if nothing is sent or received."""
        self._group, self._device, self._mesh = group, rank.device, mesh
        self._to, self._from = to, from_
        self._sent: list[tuple[dist.Work, torch.Tensor]] = []
        # NCCL connects at the first message, which takes seconds and memory.
        if self._from is not None:
            self.receive(torch.empty(1, device=self._device))
        if self._to is not None:
            self.send(torch.zeros(1, device=self._device))
        self.settle()

    def send(self, tensor: torch.Tensor) -> None:
        """Begin to send, once the previous tensor has arrived."""
        self.settle()
        self._begin(_part(tensor).contiguous())

    def send_with_shape(self, tensor: torch.Tensor) -> None:
        """Send a tensor to a stage that does not know its shape."""
        self.settle()
        self._begin(torch.tensor(Form.of(tensor).numbers))
        self._begin(_part(tensor).contiguous())

    def receive(self, into: torch.Tensor) -> torch.Tensor:
        """Fill `into`, which is contiguous, and return it."""
        work = dist.irecv(into, group=self._group, group_src=self._from)
        assert work is not None
        work.wait()
        return into

    def receive_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Receive a tensor of the form of this one."""
        part = self.receive(torch.empty_like(_part(tensor), memory_format=torch.contiguous_format))
        return sharded_like(tensor, part, tensor.shape)

    def receive_with_shape(self) -> torch.Tensor:
        form = Form.read(self.receive(torch.empty(LENGTH, dtype=torch.int64)).tolist())
        received = form.empty(self._device, self._mesh)
        self.receive(_part(received))
        return received

    def settle(self) -> None:
        """Wait until all sent tensors have arrived. On a GPU, its stream waits."""
        while self._sent:
            self._sent.pop(0)[0].wait()

    def _begin(self, tensor: torch.Tensor) -> None:
        work = dist.isend(tensor, group=self._group, group_dst=self._to)
        assert work is not None
        self._sent.append((work, tensor))


def _part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, which shares its memory and has no gradient."""
    return local(tensor.detach())


class Channels(NamedTuple):
    """The channels of one rank. Those from the last rank to the first, and back, are used with several stages
    on each rank."""

    group: dist.ProcessGroup
    "The ranks with the stages of one copy of the model."
    down: Channel
    "From each rank to the next one: activations."
    up: Channel
    "From each rank to the previous one: gradients."
    around: Channel | None
    "Activations from the last rank to the first."
    back: Channel | None
    "Gradients from the first rank to the last."

    def settle(self) -> None:
        """Wait until everything that was sent has arrived. On a GPU, its stream waits."""
        for channel in (self.down, self.up, self.around, self.back):
            if channel is not None:
                channel.settle()


def open_channels(rank: Rank, mesh: DeviceMesh | None) -> Channels:
    """Return the channels of this rank. Every rank must call this. `mesh`: the tensor-parallel ranks.

    Raises dist.DistError.
    """
    pipeline, data, tensor = rank.mesh
    columns = [[stage * data * tensor + place for stage in range(pipeline)] for place in range(data * tensor)]
    timeout = timedelta(seconds=rank.job.train.collective_timeout)
    subgroups: Any = dist.new_subgroups_by_enumeration
    at, last = rank.coordinates.pipeline, pipeline - 1
    to_next = at + 1 if at < last else None
    to_previous = at - 1 if at > 0 else None
    ways = [(to_next, to_previous), (to_previous, to_next)]
    if rank.recipe.virtual_stages > 1:
        to_first, to_last = 0 if at == last else None, last if at == 0 else None
        ways += [(to_first, to_last), (to_last, to_first)]
    groups = [subgroups(columns, timeout=timeout)[0] for _ in ways]
    channels = [
        Channel(rank, group, mesh, to, from_) for group, (to, from_) in zip(groups, ways, strict=True)
    ]
    down, up, around, back, *_ = *channels, None, None
    return Channels(groups[0], down, up, around, back)

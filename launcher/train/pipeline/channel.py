"""Messages from a stage to the next one, or to the one before: activations and gradients."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from launcher.train.rank import Rank

MOST_DIMENSIONS = 8
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def why_not_sent(result: Any) -> str | None:
    """Return what `result` is if `Channel.send_with_shape` cannot send it, or None if it can."""
    if not isinstance(result, torch.Tensor):
        return f"{type(result).__name__}, not a tensor"
    if result.dtype not in DTYPES:
        return f"a tensor of {result.dtype}, not of floats"
    return f"a tensor of {result.ndim} dimensions" if result.ndim > MOST_DIMENSIONS else None


class Channel:
    """One direction between neighbouring stages, with a process group of its own.

    NCCL runs what two ranks send each other in one group in the order of the calls: if both directions shared
    a group, a stage that sends an activation and one that sends a gradient would wait for each other.
    """

    def __init__(self, rank: Rank, group: dist.ProcessGroup, *, down: bool) -> None:
        """`down`: from each stage to the next one. Connects the ranks; all of them must call this."""
        self._group, self._device = group, rank.device
        at, step = rank.coordinates.pipeline, 1 if down else -1
        self._to = self._rank_of(at + step)
        self._from = self._rank_of(at - step)
        self._sent: list[tuple[dist.Work, torch.Tensor]] = []
        # NCCL connects at the first message, which takes seconds and memory.
        if self._from is not None:
            self.receive(torch.empty(1, device=self._device))
        if self._to is not None:
            self.send(torch.zeros(1, device=self._device))
        self.settle()

    def _rank_of(self, stage: int) -> int | None:
        return stage if 0 <= stage < dist.get_world_size(self._group) else None

    def send(self, tensor: torch.Tensor) -> None:
        """Begin to send. At most one tensor is on its way: the one before has arrived."""
        self.settle()
        self._begin(tensor.detach().contiguous())

    def send_with_shape(self, tensor: torch.Tensor) -> None:
        """Send a tensor to a stage that does not know its shape."""
        self.settle()
        about = [DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape]
        self._begin(torch.tensor(about + [0] * (2 + MOST_DIMENSIONS - len(about))))
        self._begin(tensor.detach().contiguous())

    def receive(self, into: torch.Tensor) -> torch.Tensor:
        """Fill `into`, which is contiguous, and return it."""
        work = dist.irecv(into, group=self._group, group_src=self._from)
        assert work is not None
        work.wait()
        return into

    def receive_with_shape(self) -> torch.Tensor:
        about = self.receive(torch.empty(2 + MOST_DIMENSIONS, dtype=torch.int64)).tolist()
        dtype, dimensions, *shape = about
        return self.receive(torch.empty(shape[:dimensions], dtype=DTYPES[dtype], device=self._device))

    def settle(self) -> None:
        """Wait until what was sent has arrived. On a GPU, its stream waits."""
        while self._sent:
            self._sent.pop(0)[0].wait()

    def _begin(self, tensor: torch.Tensor) -> None:
        work = dist.isend(tensor, group=self._group, group_dst=self._to)
        assert work is not None
        self._sent.append((work, tensor))


class Channels(NamedTuple):
    group: dist.ProcessGroup
    "The ranks with the stages of one copy of the model."
    down: Channel
    "From each stage to the next one: activations."
    up: Channel
    "From each stage to the one before: gradients."


def open_channels(rank: Rank) -> Channels:
    """Return the channels of this rank. Every rank must call this.

    Raises dist.DistError.
    """
    pipeline, data, tensor = rank.mesh
    columns = [[stage * data * tensor + place for stage in range(pipeline)] for place in range(data * tensor)]
    timeout = timedelta(seconds=rank.job.train.collective_timeout)
    subgroups: Any = dist.new_subgroups_by_enumeration
    down, up = (subgroups(columns, timeout=timeout)[0] for _ in range(2))
    return Channels(down, Channel(rank, down, down=True), Channel(rank, up, down=False))

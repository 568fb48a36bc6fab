"""Where a recipe that is too large would run out of memory: the moment, the phase, and the tensor."""

from __future__ import annotations

from launcher.memory.allocator import OutOfMemoryError, replay
from launcher.memory.estimate import When
from launcher.memory.timeline import Timeline
from launcher.spec.base import Value, format_bytes

WORDS = {
    "init": "when the model is made",
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer's update",
}


class Failure(Value):
    when: When
    phase: str
    tensor: str
    "What is asked for, or the module that asks."
    requested: int
    "Bytes."
    reserved: int
    "Bytes that the allocator holds then."
    capacity: int

    def __str__(self) -> str:
        what = f" for {self.tensor}" if self.tensor else ""
        return (
            f"memory runs out {WORDS[self.phase]} ({self.when}): {format_bytes(self.requested)}{what} asked "
            f"for, {format_bytes(self.reserved)} of {format_bytes(self.capacity)} reserved"
        )


def first_failure(
    line: Timeline, capacity: int, workspaces: tuple[int, ...], *, expandable: bool
) -> Failure | None:
    """`capacity`: bytes that PyTorch's allocator can have. None: it runs."""
    try:
        replay(
            line.sizes,
            line.events,
            capacity=capacity,
            before=workspaces,
            expandable=expandable,
            streams=line.streams,
        )
    except OutOfMemoryError as error:
        event = error.event or 0
        when, phase = line.at(event)
        tensor = line.names[line.events[event]]
        return Failure(
            when=when,
            phase=phase,
            tensor=tensor,
            requested=error.requested,
            reserved=error.reserved,
            capacity=capacity,
        )
    return None

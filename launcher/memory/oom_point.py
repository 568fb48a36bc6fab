"""The point at which a recipe runs out of memory: the moment, the phase and the tensor."""

from __future__ import annotations

from launcher.memory.allocator import OutOfMemoryError, replay
from launcher.memory.estimate import When
from launcher.memory.timeline import Timeline
from launcher.spec.quantities import format_bytes
from launcher.spec.value import Value

WORDS = {
    "init": "while the model is built",
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer's update",
}


class Failure(Value):
    when: When
    phase: str
    tensor: str
    "Name of the tensor, or of the module that allocates it."
    requested: int
    "Bytes."
    reserved: int
    "Bytes that the allocator holds at this point."
    capacity: int

    def __str__(self) -> str:
        what = f" for {self.tensor}" if self.tensor else ""
        return (
            f"memory runs out {WORDS[self.phase]} ({self.when}): cannot allocate "
            f"{format_bytes(self.requested)}{what}; {format_bytes(self.reserved)} of "
            f"{format_bytes(self.capacity)} are reserved"
        )


def first_failure(line: Timeline, capacity: int, *, expandable: bool) -> Failure | None:
    """Return the first allocation that exceeds the capacity, or None if everything fits.

    `capacity`: bytes that PyTorch's allocator can reserve.
    """
    try:
        replay(
            line.sizes,
            line.events,
            capacity=capacity,
            expandable=expandable,
            streams=line.streams,
        )
    except OutOfMemoryError as error:
        event = error.event
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

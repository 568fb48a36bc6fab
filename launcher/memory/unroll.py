"""Extend the trace of a few equal blocks to the whole model by repeating the middle block.

For example, a model of 80 equal blocks is traced with 4 or 5 of them. A traced step is a sequence of
segments: the forward and backward pass of each block, and the parts between them. A storage is allocated in
one segment and freed in another one. In each copy of the repeated block, it is freed as many blocks later as
in the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from launcher.memory.trace import Storage


class NotUniformError(ValueError):
    """The blocks do not behave alike, so one cannot represent the others."""


class Run(NamedTuple):
    """A row of equal blocks in a module list. Some are traced, and one of these represents the others."""

    prefix: str
    "Name of the list."
    first: int
    "Index of the first block in the list."
    length: int
    "Blocks in the model."
    kept: int
    "Blocks that were traced."
    repeated: int
    "Index of the traced block that represents the untraced ones."

    @property
    def extra(self) -> int:
        return self.length - self.kept

    def copies(self, block: int) -> range:
        """Return the blocks of the whole model that a traced block represents."""
        if block < self.repeated:
            return range(block, block + 1)
        if block == self.repeated:
            return range(block, block + self.extra + 1)
        return range(block + self.extra, block + self.extra + 1)

    def traced(self, block: int) -> int:
        """Return the traced block that represents a block of the whole model."""
        if block <= self.repeated:
            return block
        return max(self.repeated, block - self.extra)

    def split(self, module: str) -> tuple[int, str] | None:
        """Return the block of the whole model that a module is in, and its name inside the block. None if it
        is in no block."""
        position, dot, rest = module.removeprefix(self._head).partition(".")
        if not module.startswith(self._head) or not position.isdigit():
            return None
        return int(position) - self.first, dot + rest

    def name(self, block: int, rest: str) -> str:
        """Return the name of a module in a block of the whole model."""
        return f"{self._head}{self.first + block}{rest}"

    @property
    def _head(self) -> str:
        return f"{self.prefix}." if self.prefix else ""


@dataclass
class Segment:
    """The events of one block's pass, or between two blocks."""

    phase: str
    run: int | None = None
    "Number of the block's Run; None outside of all blocks."
    block: int = 0
    backward: bool = False
    events: list[int] = field(default_factory=list)
    "i >= 0: storage i is allocated. ~i: storage i is freed."
    flops: float = 0.0
    traffic: float = 0.0
    "Bytes that kernels read and write."
    exchanged: float = 0.0
    "Bytes that a tensor-parallel group exchanges, as in launcher.memory.trace.Work."
    sent: float = 0.0
    "Bytes that a stage of a pipeline sends."


@dataclass
class Recorded:
    """A traced step, before or after unrolling."""

    storages: list[Storage] = field(default_factory=list)
    "The storages that the trace allocated; the fixed size of each is its size for one micro-batch."
    segments: list[Segment] = field(default_factory=list)
    runs: Sequence[Run] = ()


Place = tuple[int, int, int]
"(number of the segment in the trace, block in the whole model, index among the allocations there)"


def placed(recorded: Recorded, first: int, length: int) -> Recorded:
    """Return the step with its one row of blocks moved to another position in the list, and with another
    length, which must be at least the number of traced blocks."""
    [before] = recorded.runs
    after = before._replace(first=first, length=length)
    storages = [s._replace(module=_moved(s.module, before, after)) for s in recorded.storages]
    return replace(recorded, storages=storages, runs=(after,))


def _moved(module: str, before: Run, after: Run) -> str:
    position = before.split(module)
    if position is None:
        return module
    block, rest = position
    return after.name(after.copies(before.traced(block))[0], rest)


def unroll(recorded: Recorded) -> Recorded:
    """Return the step of the whole model. Raises NotUniformError."""
    if not any(run.extra for run in recorded.runs):
        return recorded
    return _Unrolling(recorded).result()


class _Unrolling:
    def __init__(self, recorded: Recorded) -> None:
        self.trace = recorded
        self.unrolled = Recorded()
        self.birth: dict[int, tuple[int, int]] = {}
        "Traced storage -> (the segment that allocates it, its index among the allocations there)."
        self.alive: dict[Place, int] = {}
        "Place of an allocation -> its storage in the whole model's step."
        self.by_key: dict[tuple[str, bool, int, int], int] = {}
        "(phase, backward, run, block) -> segment."
        self.births: list[list[int]] = []
        "Segment -> the storages that it allocates."
        self.death: dict[int, int] = {}
        "Traced storage -> the segment that frees it."
        for number, segment in enumerate(recorded.segments):
            self.births.append([event for event in segment.events if event >= 0])
            self.birth.update({storage: (number, place) for place, storage in enumerate(self.births[-1])})
            self.death.update({~event: number for event in segment.events if event < 0})
            if segment.run is not None:
                key = (segment.phase, segment.backward, segment.run, segment.block)
                if key in self.by_key:
                    raise NotUniformError("a block runs more than once in a pass")
                self.by_key[key] = number
        self._check_uniform()

    def _check_uniform(self) -> None:
        for (phase, backward, run, block), number in self.by_key.items():
            middle = self.trace.runs[run].repeated
            if abs(block - middle) == 1:
                other = self.by_key.get((phase, backward, run, middle))
                if other is None or self._allocated_in(number) != self._allocated_in(other):
                    raise NotUniformError(f"blocks {block} and {middle} of the trace differ")

    def _allocated_in(self, segment: int) -> list[tuple[int, str]]:
        storages = (self.trace.storages[number] for number in self.births[segment])
        return [(storage.fixed, storage.category) for storage in storages]

    def result(self) -> Recorded:
        for number, segment in enumerate(self.trace.segments):
            if segment.run is None:
                self._emit(number, range(1))
                continue
            copies = self.trace.runs[segment.run].copies(segment.block)
            self._emit(number, copies[::-1] if segment.backward else copies)
        return self.unrolled

    def _emit(self, number: int, blocks: range) -> None:
        """Append a traced segment once for each block of the whole model that it represents."""
        segment, storages, unrolled = self.trace.segments[number], self.trace.storages, self.unrolled
        repeated = len(blocks) > 1
        names = {e: self._name(storages[e].module, segment) for e in segment.events if e >= 0}
        frees = {e: self._freed(~e, segment, repeated) for e in segment.events if e < 0}
        for block in blocks:
            events: list[int] = []
            place = 0
            for event in segment.events:
                if event < 0:
                    events += [~self._take(where) for where in frees[event](block)]
                    continue
                events.append(new := len(unrolled.storages))
                self.alive[number, block, place] = new
                place += 1
                fixed, per_sample, category, _, stream = storages[event]
                unrolled.storages.append(Storage(fixed, per_sample, category, names[event](block), stream))
            unrolled.segments.append(replace(segment, run=None, block=0, backward=False, events=events))

    def _name(self, module: str, segment: Segment) -> Callable[[int], str]:
        """Return a function: block -> the module's name in the whole model.

        The named block is as far from `block` as it was from the segment's block in the trace.
        """
        if segment.run is None:
            return lambda _: module
        run = self.trace.runs[segment.run]
        position = run.split(module)
        if position is None:
            return lambda _: module
        distance, rest = run.traced(position[0]) - segment.block, position[1]
        return lambda block: run.name(block + distance, rest)

    def _freed(self, storage: int, segment: Segment, repeated: bool) -> Callable[[int], list[Place]]:
        """Return a function: block -> the allocations that are freed in its pass."""
        birth_segment, place = self.birth[storage]
        birth = self.trace.segments[birth_segment]
        if birth.run is None:
            if repeated:
                raise NotUniformError("a block frees memory that was allocated outside of the blocks")
            return lambda _: [(birth_segment, 0, place)]
        run = self.trace.runs[birth.run]
        copies = run.copies(birth.block)
        outlasts = segment.run != birth.run or self._outlasts_the_repeated(storage)
        if self._freed_together(storage) or (outlasts and len(copies) == 1):
            return lambda _: [(birth_segment, copy, place) for copy in copies]
        if segment.run != birth.run:
            raise NotUniformError("a block frees memory that a block of another list allocated")
        distance = birth.block - segment.block
        passes = (birth.phase, birth.backward, birth.run)

        def freed(block: int) -> list[Place]:
            number = self.by_key.get((*passes, run.traced(block + distance)))
            if number is None:
                raise NotUniformError("a block frees memory of a block beyond the end of the list")
            return [(number, block + distance, place)]

        return freed

    def _freed_together(self, storage: int) -> bool:
        """Return whether all blocks' copies of a storage are freed in the same segment, as gradients are.

        Otherwise each copy is freed a fixed number of blocks after its allocation.
        """
        birth_segment, place = self.birth[storage]
        birth = self.trace.segments[birth_segment]
        neighbour = self.by_key.get((birth.phase, birth.backward, birth.run or 0, birth.block - 1))
        if neighbour is None or place >= len(self.births[neighbour]):
            return False
        return self.death.get(self.births[neighbour][place]) == self.death.get(storage)

    def _outlasts_the_repeated(self, storage: int) -> bool:
        """Return whether a storage lives while all copies of the repeated block run, as a stage's output that
        is held until the backward pass ends.

        Otherwise it is freed a fixed number of blocks after its allocation, like that of the repeated block.
        """
        birth_segment, place = self.birth[storage]
        birth, death = self.trace.segments[birth_segment], self.trace.segments[self.death[storage]]
        middle = self.trace.runs[birth.run or 0].repeated
        if (birth.block - middle) * (death.block - middle) >= 0:
            return False
        repeated = self.by_key.get((birth.phase, birth.backward, birth.run or 0, middle))
        if repeated is None:
            raise NotUniformError(f"block {birth.block} of the trace runs, and block {middle} does not")
        alike = self.births[repeated]
        if place >= len(alike) or alike[place] not in self.death:
            return True
        other = self.trace.segments[self.death[alike[place]]]
        passes = {(one.phase, one.backward, one.run) for one in (death, other)}
        return len(passes) > 1 or middle - other.block != birth.block - death.block

    def _take(self, where: Place) -> int:
        number = self.alive.pop(where, None)
        if number is None:
            raise NotUniformError("a block frees memory that another block has already freed")
        return number

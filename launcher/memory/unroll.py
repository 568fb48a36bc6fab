"""A model of 80 equal blocks is traced with 5 of them; here the one in the middle is repeated.

A traced step is a row of segments: what happens in each block's forward and backward pass, and what happens
between. A storage is born in one segment and dies in another one. In the repeated block's copies it dies as
many blocks further on as it did in the trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class NotUniformError(ValueError):
    """The blocks do not behave alike, so none of them can stand for the others."""


class Run(NamedTuple):
    """Equal blocks in one list, of which only some were traced: those before and after the repeated one."""

    prefix: str
    "Name of the list."
    first: int
    "Position in the list of the first of the blocks."
    length: int
    kept: int
    repeated: int
    "Which of the kept ones stands for those left out."

    @property
    def extra(self) -> int:
        return self.length - self.kept

    def copies(self, block: int) -> range:
        """The blocks of the whole model that a traced one stands for."""
        if block < self.repeated:
            return range(block, block + 1)
        if block == self.repeated:
            return range(block, block + self.extra + 1)
        return range(block + self.extra, block + self.extra + 1)

    def traced(self, block: int) -> int:
        """The traced block that stands for one of the whole model."""
        if block <= self.repeated:
            return block
        return max(self.repeated, block - self.extra)


@dataclass
class Segment:
    """Events from one mark to the next."""

    phase: str
    run: int | None = None
    "Number of the run; None outside of all."
    block: int = 0
    backward: bool = False
    events: list[int] = field(default_factory=list)
    "i >= 0: storage i is born; ~i: it dies."
    flops: float = 0.0
    traffic: float = 0.0
    "Bytes that its kernels read and write."


@dataclass
class Recorded:
    """A traced step, as it was recorded or unrolled."""

    sizes: list[int]
    categories: list[str]
    modules: list[str]
    streams: list[str]
    "The CUDA stream of each storage."
    segments: list[Segment]
    runs: Sequence[Run] = ()


Place = tuple[int, int]
"(number of the segment in the trace, block in the whole model)"


def unroll(recorded: Recorded) -> Recorded:
    """The step of the whole model. Raises NotUniformError."""
    if not any(run.extra for run in recorded.runs):
        return recorded
    return _Unrolling(recorded).result()


class _Unrolling:
    def __init__(self, recorded: Recorded) -> None:
        self.trace = recorded
        self.made = Recorded([], [], [], [], [])
        self.birth: dict[int, tuple[int, int]] = {}
        "Traced storage -> (its segment, its place among the births there)."
        self.alive: dict[tuple[Place, int], int] = {}
        "(where born, its place among the births there) -> number in the whole model's step."
        self.by_key: dict[tuple[str, bool, int, int], int] = {}
        self.births: list[list[int]] = []
        "Of each segment."
        self.death: dict[int, int] = {}
        "Traced storage -> the segment in which it dies."
        for number, segment in enumerate(recorded.segments):
            self.births.append([event for event in segment.events if event >= 0])
            self.birth.update({storage: (number, place) for place, storage in enumerate(self.births[-1])})
            self.death.update({~event: number for event in segment.events if event < 0})
            if segment.run is not None:
                key = (segment.phase, segment.backward, segment.run, segment.block)
                if key in self.by_key:
                    raise NotUniformError("a block runs more than once in a pass")
                self.by_key[key] = number
        self._check_alike()

    def _check_alike(self) -> None:
        for (phase, backward, run, block), number in self.by_key.items():
            middle = self.trace.runs[run].repeated
            if abs(block - middle) == 1:
                other = self.by_key.get((phase, backward, run, middle))
                if other is None or self._made_in(number) != self._made_in(other):
                    raise NotUniformError(f"blocks {block} and {middle} of the trace differ")

    def _made_in(self, segment: int) -> list[tuple[int, str]]:
        return [(self.trace.sizes[one], self.trace.categories[one]) for one in self.births[segment]]

    def result(self) -> Recorded:
        for number, segment in enumerate(self.trace.segments):
            if segment.run is None:
                self._emit(number, 0, repeated=False)
                continue
            copies = self.trace.runs[segment.run].copies(segment.block)
            for block in reversed(copies) if segment.backward else copies:
                self._emit(number, block, repeated=len(copies) > 1)
        return self.made

    def _emit(self, number: int, block: int, *, repeated: bool) -> None:
        segment = self.trace.segments[number]
        made = Segment(segment.phase, flops=segment.flops, traffic=segment.traffic)
        place = 0
        for event in segment.events:
            if event >= 0:
                made.events.append(self._born(event, (number, block), place, segment))
                place += 1
            else:
                made.events += [~one for one in self._dying(~event, segment, block, repeated)]
        self.made.segments.append(made)

    def _born(self, storage: int, where: Place, place: int, segment: Segment) -> int:
        new = len(self.made.sizes)
        self.alive[where, place] = new
        self.made.sizes.append(self.trace.sizes[storage])
        self.made.categories.append(self.trace.categories[storage])
        self.made.streams.append(self.trace.streams[storage])
        self.made.modules.append(self._renamed(self.trace.modules[storage], segment, where[1]))
        return new

    def _renamed(self, module: str, segment: Segment, block: int) -> str:
        """Of the block that is as far away in the whole model as the named one was in the trace."""
        if segment.run is None:
            return module
        run = self.trace.runs[segment.run]
        head = f"{run.prefix}." if run.prefix else ""
        position, dot, rest = module.removeprefix(head).partition(".")
        if not module.startswith(head) or not position.isdigit():
            return module
        away = run.traced(int(position) - run.first) - segment.block
        return f"{head}{run.first + block + away}{dot}{rest}"

    def _dying(self, storage: int, segment: Segment, block: int, repeated: bool) -> list[int]:
        born_in, place = self.birth[storage]
        birth = self.trace.segments[born_in]
        if birth.run is None:
            if repeated:
                raise NotUniformError("a block frees what no block has allocated")
            return [self._take((born_in, 0), place)]
        run = self.trace.runs[birth.run]
        copies = run.copies(birth.block)
        if self._dies_with_its_like(storage) or (segment.run != birth.run and len(copies) == 1):
            return [self._take((born_in, copy), place) for copy in copies]
        if segment.run != birth.run:
            raise NotUniformError("a block of one list frees what a block of another one has allocated")
        there = block + birth.block - segment.block
        key = (birth.phase, birth.backward, birth.run, run.traced(there))
        if key not in self.by_key:
            raise NotUniformError("a block frees what a block outside of the list would have allocated")
        return [self._take((self.by_key[key], there), place)]

    def _dies_with_its_like(self, storage: int) -> bool:
        """Whether those of the neighbouring blocks die in the same segment, as gradients do, and not each
        as many blocks further on."""
        born_in, place = self.birth[storage]
        birth = self.trace.segments[born_in]
        neighbour = self.by_key.get((birth.phase, birth.backward, birth.run or 0, birth.block - 1))
        if neighbour is None or place >= len(self.births[neighbour]):
            return False
        return self.death.get(self.births[neighbour][place]) == self.death.get(storage)

    def _take(self, where: Place, place: int) -> int:
        number = self.alive.pop((where, place), None)
        if number is None:
            raise NotUniformError("a block frees what another one has freed already")
        return number

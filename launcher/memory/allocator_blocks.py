"""Parts of the caching allocator's model: blocks of bytes, and the two pools of free blocks.

Constants are those of torch 2.13 (c10/core/AllocatorConfig.h). Rules are those of
c10/cuda/CUDACachingAllocator.cpp; docstrings name the matching function.
"""

from __future__ import annotations

from bisect import bisect_left, insort

MIB = 2**20
BLOCK = 512
"kMinBlockSize: every size is rounded up to a multiple of this."
SMALL = 1 * MIB
"kSmallSize: the largest request that the small pool serves."
SMALL_SEGMENT = 2 * MIB
"kSmallBuffer: the small pool's segments, and the pages of its expandable segment."
LARGE_SEGMENT = 20 * MIB
"large_segment_size: segments for requests below LARGE, and the pages of the large pool's expandable segment."
LARGE = 10 * MIB
"kMinLargeAlloc: a request of this size or more gets a segment of its own size."
LARGE_STEP = 2 * MIB
"kRoundLarge: the size of such a segment is a multiple of this."
PAGES = 2**32
"Number of pages in an expandable segment's address range: more than any GPU's memory."


class Block:
    """Adjacent bytes of one segment: held by a tensor, free, or unmapped in an expandable segment."""

    __slots__ = ("address", "after", "before", "free", "mapped", "pool", "size")

    def __init__(self, pool: Pool, address: int, size: int, *, mapped: bool = True) -> None:
        self.pool, self.address, self.size, self.mapped = pool, address, size, mapped
        self.free = True
        self.before: Block | None = None
        self.after: Block | None = None

    def cut(self, size: int) -> Block:
        """Keep the first `size` bytes and return the rest as a new free block."""
        rest = Block(self.pool, self.address + size, self.size - size, mapped=self.mapped)
        rest.before, rest.after = self, self.after
        if rest.after is not None:
            rest.after.before = rest
        self.after, self.size = rest, size
        return rest

    def merge(self) -> None:
        """Absorb free neighbours if both are mapped or both are unmapped: try_merge_blocks."""
        other = self.before
        if other is not None and other.free and other.mapped is self.mapped:
            self.pool.remove(other)
            self.address, self.size = other.address, other.size + self.size
            self.before = other.before
            if self.before is not None:
                self.before.after = self
        other = self.after
        if other is not None and other.free and other.mapped is self.mapped:
            self.pool.remove(other)
            self.size += other.size
            self.after = other.after
            if self.after is not None:
                self.after.before = self


class Pool:
    """The free blocks for small or for large requests."""

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self.page = SMALL_SEGMENT if small else LARGE_SEGMENT
        self.reserved = 0
        "Bytes of its segments, or of the mapped pages of its expandable one."
        self.free: list[tuple[int, int, Block]] = []
        "Sorted by size, then address. Addresses are unique, so blocks are never compared."
        self.unmapped: list[tuple[int, Block]] = []
        "Sorted by address."

    def add(self, block: Block) -> None:
        if block.mapped:
            insort(self.free, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def remove(self, block: Block) -> None:
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]

    def take(self, size: int) -> Block | None:
        """Remove and return the best fit: get_free_block.

        A block at the end of an expandable segment counts with the size that it can grow to.
        """
        free = self.free
        index = bisect_left(free, (size,))
        if index == len(free):
            return None
        if self.unmapped:
            room = _reach(free[index][2])
            while index + 1 < len(free) and (next_room := _reach(free[index + 1][2])) < room:
                index, room = index + 1, next_room
        return free.pop(index)[2]

    def growable(self, size: int) -> Block:
        """Return the lowest block that mapping can grow to `size` bytes: find_expandable_block."""
        for _, block in self.unmapped:
            before = block.before
            start = before if before is not None and before.free else block
            room = 0
            end: Block | None = start
            while end is not None and end.free and room < size:
                room, end = room + end.size, end.after
            if room >= size:
                return start
        whole = Block(self, 0, PAGES * self.page, mapped=False)
        self.add(whole)
        return whole


def _reach(block: Block) -> int:
    after = block.after
    return block.size if after is None or after.mapped else block.size + after.size

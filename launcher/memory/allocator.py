"""A model of PyTorch's CUDA caching allocator: the bytes that it reserves for a sequence of allocations.

The rules are those of torch 2.13 with default settings, with or without expandable_segments. Docstrings name
the matching function of c10/cuda/CUDACachingAllocator.cpp. Each CUDA stream has its own pools: memory
allocated on one stream is never reused on another one. Not modelled: CUDA graphs; the end of an
expandable segment's addresses at 9/8 of the GPU's memory. docs/accuracy.md compares the model with an
H200.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from launcher.memory.allocator_blocks import (
    BLOCK,
    LARGE,
    LARGE_SEGMENT,
    LARGE_STEP,
    PAGES,
    SMALL,
    Block,
    Pool,
)
from launcher.memory.trace import COMPUTE


class OutOfMemoryError(Exception):
    """The capacity does not suffice, even after every cached segment was released."""

    def __init__(self, requested: int, reserved: int, capacity: int, event: int = 0) -> None:
        self.requested, self.reserved, self.capacity = requested, reserved, capacity
        self.event = event
        "Index of the event that failed."
        super().__init__(f"{requested} bytes requested, {reserved} of {capacity} reserved")


def rounded(size: int) -> int:
    """Return the bytes that a tensor of `size` bytes occupies: round_size."""
    return -(-size // BLOCK) * BLOCK


def replay(
    sizes: Sequence[int],
    events: Iterable[int],
    *,
    capacity: int | None = None,
    expandable: bool = True,
    streams: Sequence[str] | None = None,
) -> CachingAllocator:
    """Return the allocator after a sequence of allocations.

    `events`: i >= 0 allocates `sizes[i]` bytes on the stream `streams[i]`, ~i frees them; without `streams`
    there is one stream. `capacity`: the most bytes that can be reserved.

    Raises:
        OutOfMemoryError: The capacity does not suffice.
    """
    allocator = CachingAllocator(capacity, expandable=expandable)
    allocate, free = allocator.allocate, allocator.free
    live: dict[int, Block | None] = {}
    index = 0
    try:
        for index, event in enumerate(events):  # noqa: B007 - read in the except clause
            if event < 0:
                free(live.pop(~event))
                continue
            live[event] = allocate(sizes[event], streams[event] if streams is not None else COMPUTE)
    except OutOfMemoryError as error:
        error.event = index
        raise
    return allocator


class CachingAllocator:
    """The allocator of one GPU. All sizes are in bytes."""

    def __init__(self, capacity: int | None = None, *, expandable: bool = True) -> None:
        self.capacity = PAGES * LARGE_SEGMENT if capacity is None else capacity
        self.expandable = expandable
        self.pools: dict[str, tuple[Pool, Pool]] = {}
        "Stream -> its pools for small and for large requests."
        self.allocated = 0
        """Bytes of tensors, each rounded up, including remainders of blocks that are too small to split off:
        torch.cuda.memory_allocated()."""
        self.reserved = self.peak_reserved = 0
        "Bytes of segments: torch.cuda.memory_reserved(), and the most so far."
        self.peak_pools: dict[str, int] = {}
        "Stream -> bytes that its pools held when `peak_reserved` was reached."
        self.retries = 0
        "How often it has released its cache to satisfy a request: num_alloc_retries."
        self._address = 0

    def allocate(self, size: int, stream: str = COMPUTE) -> Block | None:
        """Return a block, or None for an empty tensor.

        Raises:
            OutOfMemoryError: The cache has been released; nothing else has changed.
        """
        if size == 0:
            return None
        size = rounded(size)
        if stream not in self.pools:
            self.pools[stream] = Pool(small=True), Pool(small=False)
        small, large = self.pools[stream]
        pool = small if size <= SMALL else large
        block = pool.take(size) or self._reserve(pool, size)
        rest = block.size - size
        if rest > SMALL or (rest and (pool.small or self.expandable)):  # should_split
            pool.add(block.cut(size))
        block.free = False
        self.allocated += block.size
        return block

    def free(self, block: Block | None) -> None:
        """Free a block that `allocate` returned. Its bytes stay reserved."""
        if block is None:
            return
        self.allocated -= block.size
        block.free = True
        block.merge()
        block.pool.add(block)

    def release(self) -> None:
        """Release segments that hold no tensor, or such pages of an expandable segment: empty_cache()."""
        for pool in (pool for pools in self.pools.values() for pool in pools):
            for _, _, block in list(pool.free):
                if self.expandable:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    pool.remove(block)
                    pool.reserved -= block.size
                    self.reserved -= block.size

    def _reserve(self, pool: Pool, size: int) -> Block:
        grow = self._map if self.expandable else self._segment
        block = grow(pool, size)
        if block is None:
            self.release()
            self.retries += 1
            block = grow(pool, size)
        if block is None:
            raise OutOfMemoryError(size, self.reserved, self.capacity)
        return block

    def _segment(self, pool: Pool, size: int) -> Block | None:
        """Reserve a new segment; return None if it exceeds the capacity: get_allocation_size."""
        whole = -(-size // LARGE_STEP) * LARGE_STEP if size >= LARGE else pool.page
        if not self._count(pool, whole):
            return None
        block = Block(pool, self._address, whole)
        self._address += whole
        return block

    def _map(self, pool: Pool, size: int) -> Block | None:
        """Map pages at the lowest address where they give `size` bytes: try_allocate_expandable_block."""
        block = pool.growable(size)
        while not block.mapped or block.size < size:
            unmapped, missing = (block.after, size - block.size) if block.mapped else (block, size)
            assert unmapped is not None
            pages = min(unmapped.size, -(-missing // pool.page) * pool.page)
            if not self._count(pool, pages):
                return None
            pool.remove(unmapped)
            if pages < unmapped.size:
                pool.add(unmapped.cut(pages))
            unmapped.mapped = True
            unmapped.merge()
            pool.add(unmapped)
            block = unmapped
        pool.remove(block)
        return block

    def _unmap(self, block: Block) -> None:
        """Unmap the whole pages of a free block: unmap_block."""
        pool = block.pool
        begin = -(-block.address // pool.page) * pool.page
        end = (block.address + block.size) // pool.page * pool.page
        if begin >= end:
            return
        pool.remove(block)
        if begin > block.address:
            head, block = block, block.cut(begin - block.address)
            pool.add(head)
        if end < block.address + block.size:
            pool.add(block.cut(end - begin))
        block.mapped = False
        block.merge()
        pool.add(block)
        pool.reserved -= end - begin
        self.reserved -= end - begin

    def _count(self, pool: Pool, size: int) -> bool:
        if self.reserved + size > self.capacity:
            return False
        pool.reserved += size
        self.reserved += size
        if self.reserved > self.peak_reserved:
            self.peak_reserved = self.reserved
            self.peak_pools = {
                stream: small.reserved + large.reserved for stream, (small, large) in self.pools.items()
            }
        return True

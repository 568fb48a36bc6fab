"""Each rule of the caching allocator by hand, and what must hold for any sequence of allocations."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.memory.allocator import CachingAllocator, OutOfMemoryError, replay
from launcher.memory.allocator_blocks import Block
from tests.bounded_work import in_bounded_work

MIB = 2**20


def reserved(*sizes: int, expandable: bool = False) -> int:
    """By tensors of these sizes, alive together."""
    return replay(sizes, range(len(sizes)), expandable=expandable).reserved


def in_mib(*sizes: float) -> list[int]:
    return [int(size * MIB) for size in sizes]


@pytest.mark.parametrize(("size", "held"), [(0, 0), (1, 512), (512, 512), (513, 1024), (3 * MIB, 3 * MIB)])
def test_a_tensor_holds_whole_512_bytes(size, held):
    assert replay([size], [0]).allocated == held


@pytest.mark.parametrize(
    ("sizes", "segments"),
    [
        ([1], 2),  # the small pool
        ([MIB], 2),
        ([MIB, MIB], 2),
        ([MIB, MIB, 1], 4),
        ([MIB + 1], 20),  # 1 to 10 MiB
        ([10 * MIB - 512], 20),
        ([9 * MIB, 9 * MIB], 20),
        ([9 * MIB, 9 * MIB, 9 * MIB], 40),
        ([10 * MIB], 10),  # a segment of its own
        ([10 * MIB + 1], 12),
        ([1, 3 * MIB, 30 * MIB], 2 + 20 + 30),
    ],
)
def test_segments_without_expandable_ones(sizes, segments):
    assert reserved(*sizes) == segments * MIB


@pytest.mark.parametrize(
    ("sizes", "pages"),
    [
        ([1], 2),
        ([MIB] * 5, 6),
        ([MIB + 1], 20),
        ([45 * MIB], 60),
        ([45 * MIB, 15 * MIB], 60),
        ([45 * MIB, 25 * MIB], 80),  # the 15 free ones, and a page
        ([45 * MIB, 15 * MIB, 2 * MIB], 80),
        ([1, 45 * MIB], 2 + 60),
    ],
)
def test_an_expandable_segment_grows_by_pages(sizes, pages):
    assert reserved(*sizes, expandable=True) == pages * MIB


def test_the_smallest_block_that_fits_is_taken():
    sizes = in_mib(50, 30, 28, 48)
    assert replay(sizes, [0, 1, ~0, ~1, 2, 3], expandable=False).peak_reserved == 80 * MIB


@pytest.mark.parametrize(("size", "held"), [(11, 12), (10.5, 10.5)])
def test_a_rest_of_up_to_1_mib_of_a_large_block_stays_with_the_tensor(size, held):
    allocator = CachingAllocator(expandable=False)
    allocator.free(allocator.allocate(12 * MIB))
    allocator.allocate(int(size * MIB))
    assert (allocator.allocated, allocator.reserved) == (held * MIB, 12 * MIB)


def test_an_expandable_segment_is_cut_to_the_block():
    allocator = CachingAllocator(expandable=True)
    allocator.free(allocator.allocate(12 * MIB))
    allocator.allocate(12 * MIB - 512)
    assert allocator.allocated == 12 * MIB - 512


def test_free_neighbours_become_one_block():
    sizes = in_mib(5, 5, 5, 5, 20)
    apart = replay([*sizes[:4], 10 * MIB], [0, 1, 2, 3, ~0, ~2, 4], expandable=False)
    assert apart.reserved == 30 * MIB  # two holes of 5 MiB with a tensor between them
    assert replay(sizes, [0, 1, 2, 3, ~0, ~2, ~1, ~3, 4], expandable=False).peak_reserved == 20 * MIB


def test_two_segments_never_become_one_block():
    sizes = in_mib(20, 20, 40)
    assert replay(sizes, [0, 1, ~0, ~1, 2], expandable=False).peak_reserved == 80 * MIB
    assert replay(sizes, [0, 1, ~0, ~1, 2], expandable=True).peak_reserved == 40 * MIB


def test_the_growing_end_is_used_after_the_holes_that_fit():
    # 40 MiB free, then a tensor of 30, then 10 free at the end. 5 MiB would fit there more tightly, but the
    # end counts as endless: they go into the hole, where 40 MiB then have no room, and the end grows by 40.
    sizes = in_mib(40, 30, 5, 40)
    assert replay(sizes, [0, 1, ~0, 2, 3], expandable=True).peak_reserved == 120 * MIB


def test_at_its_capacity_it_gives_free_segments_back_and_tries_again():
    sizes = in_mib(30, 40)
    run = replay(sizes, [0, ~0, 1], capacity=60 * MIB, expandable=False)
    assert (run.peak_reserved, run.retries) == (40 * MIB, 1)
    assert replay(sizes, [0, ~0, 1], expandable=False).peak_reserved == 70 * MIB


def test_a_segment_with_a_tensor_on_it_is_not_given_back():
    sizes = in_mib(5, 15, 30)
    with pytest.raises(OutOfMemoryError) as caught:
        replay(sizes, [0, 1, ~1, 2], capacity=49 * MIB, expandable=False)
    error = caught.value
    assert (error.requested, error.event, error.reserved) == (30 * MIB, 3, 20 * MIB)


def test_an_expandable_segment_gives_single_pages_back():
    # Page 0 free, page 1 in use: 40 MiB find no adjacent room, page 0 goes back, the end grows by two pages.
    sizes = in_mib(20, 20, 40)
    run = replay(sizes, [0, 1, ~0, 2], capacity=60 * MIB, expandable=True)
    assert (run.peak_reserved, run.retries) == (60 * MIB, 1)
    # A page that a tensor ends on stays: 21 MiB reach into page 1.
    with pytest.raises(OutOfMemoryError):
        replay(in_mib(21, 19, 40), [0, 1, ~1, 2], capacity=60 * MIB, expandable=True)


def test_pages_given_back_are_mapped_again_where_they_were():
    allocator = CachingAllocator(60 * MIB, expandable=True)
    first, _ = allocator.allocate(20 * MIB), allocator.allocate(20 * MIB)
    allocator.free(first)
    allocator.release()
    assert allocator.reserved == 20 * MIB
    again = allocator.allocate(20 * MIB)
    assert again is not None and (again.address, allocator.reserved) == (0, 40 * MIB)


def test_memory_may_run_out_at_the_first_event():
    with pytest.raises(OutOfMemoryError, match="2097152 bytes requested, 0 of 1048576 reserved") as caught:
        replay(in_mib(2), [0], capacity=MIB)
    assert caught.value.event == 0


def test_tensors_that_stay_count():
    assert replay(in_mib(100, 7, 3, 5), [0, 1, 2, ~2, 3]).allocated == 112 * MIB


sizes_of_tensors = st.one_of(
    st.integers(0, 4096), st.integers(1, 2 * MIB), st.integers(MIB, 64 * MIB), st.just(20 * MIB)
)


@st.composite
def traces(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Sizes and events; most tensors are freed, in any order."""
    sizes = draw(st.lists(sizes_of_tensors, min_size=1, max_size=40))
    live: list[int] = []
    events: list[int] = []
    for number in range(len(sizes)):
        events.append(number)
        live.append(number)
        for _ in range(draw(st.integers(0, min(2, len(live))))):
            events.append(~live.pop(draw(st.integers(0, len(live) - 1))))
    return sizes, events


@given(traces(), st.booleans(), st.one_of(st.none(), st.integers(0, 300 * MIB)))
def test_no_byte_is_lost_or_given_twice(trace, expandable, capacity):
    sizes, events = trace
    allocator = CachingAllocator(capacity, expandable=expandable)
    live: dict[int, Block | None] = {}
    for event in events:
        if event < 0:
            allocator.free(live.pop(~event, None))
            continue
        with suppress(OutOfMemoryError):
            live[event] = allocator.allocate(sizes[event])
        blocks = [block for block in live.values() if block is not None]
        free = [block for pools in allocator.pools.values() for pool in pools for _, _, block in pool.free]
        assert allocator.allocated == sum(block.size for block in blocks)
        assert allocator.reserved == sum(block.size for block in (*blocks, *free)) >= allocator.allocated
        assert capacity is None or allocator.reserved <= capacity
        spans = sorted((id(block.pool), block.address, block.size) for block in (*blocks, *free))
        for (pool, start, size), (next_pool, next_start, _) in pairwise(spans):
            assert pool != next_pool or start + size <= next_start
    for block in live.values():
        allocator.free(block)
    allocator.release()
    assert (allocator.allocated, allocator.reserved) == (0, 0)


def test_forty_thousand_events_take_little_work():
    sizes = [(number * 7919 % 97 + 1) * 300_000 for number in range(20_000)]
    events = [event for number in range(20_000) for event in (number, ~(number - 200))[: 1 + (number >= 200)]]
    with in_bounded_work(3_000_000):
        replay(sizes, events)


def test_memory_of_one_stream_is_not_reused_on_another_one():
    sizes, events = [100 * MIB, 100 * MIB], [0, ~0, 1, ~1]
    assert replay(sizes, events).peak_reserved == 100 * MIB
    streams = ["compute", "all-gather"]
    apart = replay(sizes, events, streams=streams)
    assert (apart.peak_reserved, apart.peak_pools) == (
        200 * MIB,
        {"compute": 100 * MIB, "all-gather": 100 * MIB},
    )
    assert replay(sizes, [0, ~0, 1], streams=streams).allocated == 100 * MIB


def test_a_full_gpu_releases_the_cache_of_every_stream():
    sizes, events, streams = [100 * MIB, 100 * MIB], [0, ~0, 1], ["all-gather", "compute"]
    full = replay(sizes, events, streams=streams, capacity=120 * MIB)
    assert (full.peak_reserved, full.retries) == (100 * MIB, 1)

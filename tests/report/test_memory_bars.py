from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from launcher.memory.estimate import Estimate, Peak
from launcher.report.memory_bars import ALLOCATOR, OUTSIDE, bars, in_cells


@given(st.lists(st.integers(0, 10**12), min_size=1), st.integers(1, 100))
def test_the_cells_of_a_bar_are_off_by_one_at_most_and_fill_it_together(sizes: list[int], width: int) -> None:
    capacity = sum(sizes)
    cells = in_cells(sizes, capacity, width)
    assert sum(cells) == (width if capacity else 0)
    exact = [width * size / max(capacity, 1) for size in sizes]
    assert all(abs(cell - one) <= 1 for cell, one in zip(cells, exact, strict=True))


def test_the_last_bar_is_all_that_is_needed() -> None:
    peaks = [
        Peak(when="first step", phase="forward", module="a", allocated=5, parts={"parameters": 3, "new": 2}),
        Peak(when="steady state", phase="backward", module="b", allocated=7, parts={"parameters": 7}),
    ]
    estimate = Estimate(
        peaks=tuple(peaks), reserved=10, overhead={"CUDA context": 4}, host={}, band=0.05, basis="traced"
    )
    first, second, needed = bars(estimate)
    assert [*first.parts.items()] == [("parameters", 3), ("new", 2), (OUTSIDE, 4)]
    assert (first.total, second.total, needed.total) == (9, 11, estimate.needed)
    assert needed.parts == {"parameters": 7, ALLOCATOR: 3, OUTSIDE: 4}

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from launcher.report.thinned_series import ends, is_gap, parts_of, parts_with_gaps, thinned

VALUES = st.lists(st.none() | st.floats(-1e6, 1e6), min_size=1, max_size=300)


@given(VALUES, st.integers(1, 40))
def test_the_lowest_and_the_highest_value_of_every_part_stay_in_their_order(
    values: list[float | None], most: int
) -> None:
    parts = parts_of(len(values), most)
    drawn = thinned(values, parts)
    assert len(drawn) == len(ends(values, parts)) <= 2 * most
    assert [row for part in parts for row in part] == list(range(len(values)))
    at = 0
    for part in parts:
        known = [value for value in values[part.start : part.stop] if value is not None]
        width = min(len(part), 2)
        low_and_high = {min(known), max(known)} if known else {None}
        assert {*drawn[at : at + width]} == low_and_high
        first, last = drawn[at], drawn[at + width - 1]
        assert first is None or last is None or known.index(first) <= known.index(last)
        at += width


@given(
    st.lists(st.none() | st.just(math.nan) | st.floats(-9, 9), min_size=1, max_size=300), st.integers(1, 40)
)
def test_a_part_with_a_gap_keeps_it_beside_its_extremes(values: list[float | None], most: int) -> None:
    parts = parts_of(len(values), most)
    other = [1.0] * len(values)
    gaps = parts_with_gaps([other, values], parts)
    drawn, beside, rows = (
        thinned(values, parts, gaps),
        thinned(other, parts, gaps),
        list(range(len(values))),
    )
    places = ends(rows, parts, gaps)
    assert len(drawn) == len(beside) == len(places) <= 3 * most and places == sorted(places)
    at = 0
    for number, part in enumerate(parts):
        of_part = values[part.start : part.stop]
        assert any(map(is_gap, of_part)) == (number in gaps)
        width = 1 if len(part) == 1 else 3 if number in gaps else 2
        known = [value for value in of_part if value is not None and not is_gap(value)]
        shown = drawn[at : at + width]
        assert any(map(is_gap, shown)) == (number in gaps)
        assert {value for value in shown if value is not None and not is_gap(value)} == (
            {min(known), max(known)} if known else set()
        )
        assert {*beside[at : at + width]} <= {1.0, None} and beside[at] == beside[at + width - 1] == 1.0
        at += width


def test_a_short_series_stays_as_it_is() -> None:
    values = [3.0, None, 1.0]
    assert thinned(values, parts_of(3, 2)) == values == ends(values, parts_of(3, 2))

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from launcher.report.thin import ends, parts_of, thinned

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


def test_a_short_series_stays_as_it_is() -> None:
    values = [3.0, None, 1.0]
    assert thinned(values, parts_of(3, 2)) == values == ends(values, parts_of(3, 2))

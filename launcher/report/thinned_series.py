"""Thin out long series for a page. The lowest and highest value of every part are kept, and so are gaps."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from itertools import pairwise
from typing import TypeAlias

Values: TypeAlias = Sequence[float | None]
"Values of one series. None means no value at this point; NaN is not a number, so the line has a gap there."


def parts_of(count: int, most: int) -> list[range]:
    """Return `count` rows as consecutive parts of nearly equal length.

    Each row is a part of its own if there are at most 2 x `most` rows, otherwise there are `most` parts.
    """
    if count <= 2 * most:
        return [range(row, row + 1) for row in range(count)]
    ends = [round(count * part / most) for part in range(most + 1)]
    return [range(start, end) for start, end in pairwise(ends)]


def is_gap(value: float | None) -> bool:
    return value != value  # of all values, only NaN differs from itself


def parts_with_gaps(series: Iterable[Values], parts: Sequence[range]) -> frozenset[int]:
    """Return the numbers of the parts in which a series has a NaN."""
    gaps = {row for values in series for row, value in enumerate(values) if is_gap(value)}
    return frozenset(number for number, part in enumerate(parts) if not gaps.isdisjoint(part))


def extremes(values: Values) -> tuple[float | None, float | None]:
    """Return the lowest and the highest value in the order in which they occur. No value may be NaN."""
    known = [value for value in values if value is not None]
    if not known:
        return None, None
    low, high = min(known), max(known)
    return (low, high) if known.index(low) <= known.index(high) else (high, low)


def thinned(values: Values, parts: Sequence[range], gaps: Container[int] = ()) -> list[float | None]:
    """Return one value for a part with a single row, three for a part in `gaps`, and two for other parts."""
    values_of_parts: list[float | None] = []
    for number, part in enumerate(parts):
        rows = values[part.start : part.stop]
        if len(part) == 1:
            values_of_parts.append(rows[0])
        elif number in gaps:
            values_of_parts += _extremes_and_gap(rows)
        else:
            values_of_parts += extremes(rows)
    return values_of_parts


def ends(values: Values, parts: Sequence[range], gaps: Container[int] = ()) -> list[float | None]:
    """Return the positions of the values that `thinned` returns.

    They are the first and last value of each part, and for a part in `gaps`, one between them.
    """
    positions: list[float | None] = []
    for number, part in enumerate(parts):
        middle = [part[len(part) // 2]] if number in gaps else []
        rows = part if len(part) == 1 else (part[0], *middle, part[-1])
        positions += [values[row] for row in rows]
    return positions


def _extremes_and_gap(values: Values) -> list[float | None]:
    """Return the lowest and the highest value and the first NaN in the order in which they occur."""
    gap = next((row for row, value in enumerate(values) if is_gap(value)), None)
    low, high = extremes([None if is_gap(value) else value for value in values])
    if gap is None:
        return [low, None, high]
    if low is None or high is None:
        return [math.nan] * 3
    rows = (values.index(low), values.index(high), gap)
    return [values[row] for row in sorted(rows)]

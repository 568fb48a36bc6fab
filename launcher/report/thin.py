"""Thin out long series for a page. The lowest and the highest value of every part stay."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

Values: TypeAlias = Sequence[float | None]
"Values of one series. None: there is none at this point."


def parts_of(count: int, most: int) -> list[range]:
    """Return `count` rows as consecutive parts of nearly equal length.

    Each row is a part of its own if there are at most 2 x `most` rows, otherwise there are `most` parts.
    """
    if count <= 2 * most:
        return [range(row, row + 1) for row in range(count)]
    ends = [round(count * part / most) for part in range(most + 1)]
    return [range(start, end) for start, end in pairwise(ends)]


def extremes(values: Values) -> tuple[float | None, float | None]:
    """Return the lowest and the highest value in the order in which they occur."""
    there = [value for value in values if value is not None]
    if not there:
        return None, None
    low, high = min(there), max(there)
    return (low, high) if there.index(low) <= there.index(high) else (high, low)


def thinned(values: Values, parts: Sequence[range]) -> list[float | None]:
    """Return two values for each part, and one for a part of a single row."""
    found: list[float | None] = []
    for part in parts:
        found += extremes(values[part.start : part.stop]) if len(part) > 1 else [values[part.start]]
    return found


def ends(values: Values, parts: Sequence[range]) -> list[float | None]:
    """Return the first and the last value of each part: the positions of what `thinned` returns."""
    found: list[float | None] = []
    for part in parts:
        found += [values[part.start], values[part.stop - 1]] if len(part) > 1 else [values[part.start]]
    return found

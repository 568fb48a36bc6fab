"""The memory of an estimate by category, as bars for a terminal or a page."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, get_args

from launcher.memory.estimate import Estimate, When

WHENS = get_args(When)
OUTSIDE = "outside PyTorch"
ALLOCATOR = "allocator"


class Category(NamedTuple):
    """How a category of memory is drawn."""

    letter: str
    rich: str
    "Colour in a terminal."
    css: str


CATEGORIES: dict[str, Category] = {
    "parameters": Category("P", "blue", "#4c78a8"),
    "buffers": Category("b", "bright_blue", "#9ecae9"),
    "optimizer states": Category("O", "magenta", "#b279a2"),
    "gradients": Category("G", "green", "#54a24b"),
    "gathered parameters": Category("g", "cyan", "#72b7b2"),
    "activations": Category("A", "yellow", "#eeca3b"),
    "temporaries": Category("T", "red", "#e45756"),
    "communication": Category("C", "bright_magenta", "#ff9da6"),
    "batch": Category("B", "bright_green", "#88d27a"),
    "cuBLAS workspaces": Category("w", "bright_cyan", "#d6a5c9"),
    ALLOCATOR: Category("r", "bright_black", "#9d9d9d"),
    OUTSIDE: Category("x", "white", "#6b6b6b"),
}
OTHER = Category("?", "bright_black", "#bab0ac")
"Drawn for a category that is not in the table."


class Bar(NamedTuple):
    """The memory of a rank's GPU at one moment, by category."""

    when: str
    phase: str
    module: str
    parts: dict[str, int]
    "Category -> bytes. Allocated categories come first."
    allocated: int | None
    "Allocated bytes only; None in the bar of the total."

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def bars(estimate: Estimate) -> list[Bar]:
    """Return a bar for each peak, including memory outside the allocator, and one for the total needed."""
    outside = sum(estimate.overhead.values())
    all_bars = []
    for peak in sorted(estimate.peaks, key=lambda peak: WHENS.index(peak.when)):
        parts = _sorted({**peak.parts, OUTSIDE: outside})
        all_bars.append(Bar(peak.when, peak.phase, peak.module, parts, peak.allocated))
    worst = estimate.worst
    rest = max(0, estimate.needed - outside - worst.allocated)
    parts = _sorted({**worst.parts, ALLOCATOR: rest, OUTSIDE: outside})
    return [*all_bars, Bar("needed", "in all", "", parts, None)]


def _sorted(parts: dict[str, int]) -> dict[str, int]:
    order = [*CATEGORIES]
    names = sorted(parts, key=lambda name: order.index(name) if name in order else len(order) - 2.5)
    return {name: parts[name] for name in names if parts[name]}


def in_cells(sizes: Sequence[int], capacity: int, width: int) -> list[int]:
    """Return sizes as numbers of characters in a bar of `width` characters for `capacity` bytes.

    They are rounded so that their sum is correct.
    """
    ends, at = [0], 0
    for size in sizes:
        at += size
        ends.append(round(width * at / capacity) if capacity else 0)
    return [end - start for start, end in pairwise(ends)]

"""How far estimates of GPU memory have been from measured figures, and the error band that follows."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Literal, NamedTuple

FILE = Path(__file__).with_suffix(".json")
"""Errors against measured figures; `benchmarks/memory_published.py --save` writes those
against published figures."""


class KnownError(NamedTuple):
    """An estimate, and the memory that PyTorch's allocator reserved in a run of the same recipe."""

    run: str
    "What was trained, where and how."
    measured_by: Literal["others", "launcher"]
    "`others`: the figure was published, and the recipe with it. `launcher`: measured with launcher on a GPU."
    error: float
    "estimate / measured - 1."


@functools.cache
def known_errors() -> tuple[KnownError, ...]:
    return tuple(KnownError(**entry) for entry in json.loads(FILE.read_text()))


@functools.cache
def error_band() -> float:
    """Return the relative error band of a traced estimate: twice the root mean square of the known errors of
    one kind, the larger of both.

    If errors are normal with mean 0, it holds 95 % of them. Many runs of one kind, on one type of GPU, cannot
    hide the errors of the other kind.
    """
    by_source: dict[str, list[float]] = {}
    for entry in known_errors():
        by_source.setdefault(entry.measured_by, []).append(entry.error)
    return max(
        2 * math.sqrt(sum(error**2 for error in errors) / len(errors)) for errors in by_source.values()
    )


def save(measured_by: Literal["others", "launcher"], errors: dict[str, float]) -> None:
    """Replace the known errors of one kind by `errors`, a map from run to error."""
    others = [entry for entry in known_errors() if entry.measured_by != measured_by]
    new = [KnownError(run, measured_by, round(error, 4)) for run, error in errors.items()]
    FILE.write_text(json.dumps([entry._asdict() for entry in (*others, *new)], indent=1) + "\n")
    known_errors.cache_clear()
    error_band.cache_clear()

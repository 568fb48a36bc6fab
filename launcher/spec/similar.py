"""Suggest the name that was probably meant in place of an unknown one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

CUTOFF = 0.7
"Least similarity of a suggested name, from 0 to 1, as `difflib.get_close_matches` measures it."


def similar(given: str, known: Iterable[str]) -> str | None:
    """Return the name that was probably meant, or None.

    This is the only name that starts with the given one (`fp16-mixed` for `fp16`) or that the given one
    starts with (`tensor` for `tensor_parallel`), else the most similar name.
    """
    names = list(known)
    longer = [name for name in names if given and name.startswith(given)]
    candidates = longer or [name for name in names if given.startswith(f"{name}_")]
    if len(candidates) == 1:
        return candidates[0]
    return next(iter(difflib.get_close_matches(given, names, n=1, cutoff=CUTOFF)), None)


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return a question with the name that was probably meant, or an empty text."""
    name = similar(given, known)
    return "" if name is None else f"did you mean {name!r}?"

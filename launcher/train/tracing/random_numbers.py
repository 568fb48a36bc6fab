"""Run code that may draw random numbers of Python or numpy, with numbers from both ends of their range.

A task may draw a number in a step to decide whether a layer runs (LayerDrop) or how long a sample is. One
draw does not show what another step needs.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from launcher.train.rng import numpy, random_state, set_rng_state

HOST = torch.device("cpu")
LOW, HIGH = (0.01,), (0.99, 0.9, 0.8, 0.7, 0.6, 0.49, 0.9)
"""The numbers, in turn: `randrange` draws again if a number is too high. numpy's `randint` uses the last bits
of a number, so that it gets any."""
DRAWN = 256
"""Low or high words of 32 bits, of which `random.random` takes two. Those that follow are random: code may
draw until it gets another number."""

T = TypeVar("T")


def under_draws(run: Callable[[], T]) -> tuple[T, ...]:
    """Return what `run` returns under low and under high random numbers; one result if it draws none.

    The generators' states are restored. torch's random numbers have no values in a trace.
    """
    results: list[T] = []
    before = random_state(HOST)
    try:
        for numbers in (LOW, HIGH):
            set_rng_state({**before, **_drawing(numbers, before)}, HOST)
            seeded = _state()
            results.append(run())
            if _state() == seeded:
                break
    finally:
        set_rng_state(before, HOST)
    return tuple(results)


def _state() -> object:
    state = random_state(HOST)
    return state["python"], str(state.get("numpy"))


def _drawing(numbers: tuple[float, ...], before: dict[str, Any]) -> dict[str, Any]:
    """Return states in which the next DRAWN words are these fractions of the largest one. Both generators are
    MT19937, unless the code has given numpy another one, which keeps its state."""
    version, words, _ = random.Random(0).getstate()
    own = itertools.islice(itertools.cycle(numbers), DRAWN)
    words = [*(_untempered(int(number * 2**32)) for number in own), *words[DRAWN:-1]]
    states: dict[str, Any] = {"python": (version, (*words, 0), None)}
    if numpy is not None and isinstance(before["numpy"], tuple):
        states["numpy"] = ("MT19937", numpy.array(words, dtype="uint32").tobytes(), 0, 0, 0.0)
    return states


def _untempered(word: int) -> int:
    """Return the word of MT19937's state whose output is `word` (Matsumoto and Nishimura 1998, tempering)."""
    word ^= word >> 18
    word ^= word << 15 & 0xEFC60000
    mixed = word
    for _ in range(4):
        mixed = word ^ (mixed << 7 & 0x9D2C5680)
    unshifted = mixed
    for _ in range(2):
        unshifted = mixed ^ unshifted >> 11
    return unshifted

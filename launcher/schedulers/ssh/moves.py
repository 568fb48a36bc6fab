"""Decide which waiting runs of a sweep move to another host. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.rundir.layout import RunDir


@dataclass(frozen=True)
class Living:
    """A run of a sweep that has not ended."""

    run: RunDir
    host: str
    waits: bool
    "Whether it has not begun."
    places: float
    "Number of runs of the sweep that run at the same time on its host."


def to_move(host: str, living: Sequence[Living], at_once: float) -> tuple[list[Living], float]:
    """Return the runs that move to a free host next, and the number of places it then has; [] if none may.

    Hosts do not know of each other: each starts its waiting runs when it has GPUs and a place. After the
    move, at most `at_once` runs on all hosts together must therefore be able to run. Usually one run moves.
    If a host frees a place only when it loses all its waiting runs, all of them move.
    """
    here = [one for one in living if one.host == host]
    waiting = [one for one in living if one.waits]
    if any(one.waits for one in here):
        return [], 0
    for source in dict.fromkeys(one.host for one in waiting):
        there = [one for one in waiting if one.host == source]
        for moved in (there[:1], there):
            staying = [one for one in living if one.host != host and one not in moved]
            places = at_once - _most(staying)
            if places > len(here):
                return moved, places
    return [], 0


def _most(living: Sequence[Living]) -> float:
    """Return how many of these runs could run at the same time."""
    by_host: dict[str, list[Living]] = {}
    for one in living:
        by_host.setdefault(one.host, []).append(one)
    return sum(min(len(runs), *(one.places for one in runs)) for runs in by_host.values())

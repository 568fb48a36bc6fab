"""Which waiting runs of a sweep move to another host. Nothing is asked or done here."""

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
    "It has not begun."
    places: float
    "How many runs of the sweep go on at the same time on its host."


def to_move(host: str, living: Sequence[Living], at_once: float) -> tuple[list[Living], float]:
    """Return the runs that move to a free host next, and how many places it has then; [] if none may.

    Hosts do not know of each other: each starts what waits there when it has GPUs and a place. So after the
    move there are at most `at_once` runs that could go on, on all hosts together. Often one run moves; if
    only a host that loses all its waiting runs gives a place away, all of these do.
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
    """How many of these runs could go on at the same time."""
    by_host: dict[str, list[Living]] = {}
    for one in living:
        by_host.setdefault(one.host, []).append(one)
    return sum(min(len(runs), *(one.places for one in runs)) for runs in by_host.values())

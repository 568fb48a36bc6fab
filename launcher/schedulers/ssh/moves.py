"""Decide which waiting runs of a sweep move to another host. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.rundir.layout import RunDir


@dataclass(frozen=True)
class LiveRun:
    """A run of a sweep that has not ended yet."""

    run: RunDir
    host: str
    waits: bool
    "Whether it has not begun."
    places: float
    "Number of runs of the sweep that run at the same time on its host."


def next_move(host: str, living: Sequence[LiveRun], at_once: float) -> tuple[list[LiveRun], float]:
    """Return the runs that move to a free host next, and how many runs may then run there; [] if none move.

    The hosts do not communicate: each starts its waiting runs when it has free GPUs and places. So after the
    move, no more than `at_once` runs may be able to run on all hosts together. Usually one run moves. If its
    host frees a place only by losing all its waiting runs, all of them move.
    """
    running_here = [run for run in living if run.host == host]
    waiting = [run for run in living if run.waits]
    if any(run.waits for run in running_here):
        return [], 0
    for source in dict.fromkeys(run.host for run in waiting):
        from_source = [run for run in waiting if run.host == source]
        for moved in (from_source[:1], from_source):
            staying = [run for run in living if run.host != host and run not in moved]
            places = at_once - _max_concurrent(staying)
            if places > len(running_here):
                return moved, places
    return [], 0


def _max_concurrent(living: Sequence[LiveRun]) -> float:
    """Return how many of these runs could run at the same time."""
    by_host: dict[str, list[LiveRun]] = {}
    for run in living:
        by_host.setdefault(run.host, []).append(run)
    return sum(min(len(runs), *(run.places for run in runs)) for runs in by_host.values())

"""How often a command that follows a run queries Slurm."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from launcher.rundir.layout import RunDir

SOONEST_SECONDS = 5.0
"Minimum pause between two queries of one process about the same jobs, and between two looks at run files."
LATEST_SECONDS = 60.0
QUIET_SECONDS = 30.0
"After this long without activity, a run that was active before is queried again."


class Pace:
    """Decides when to query Slurm again.

    While the runs are active, query once a minute. Otherwise the pause grows from 5 s to a minute. After a
    change of a run's state, query at once.
    """

    def __init__(self, runs: Iterable[RunDir], clock: Callable[[], float] = time.monotonic) -> None:
        self._runs, self._clock = list(runs), clock
        self._queried_at = self._checked_at = self._active_at = clock()
        self._pause, self._active = SOONEST_SECONDS, False
        self._states, self._signs_of_life = self._read()

    def is_due(self) -> bool | None:
        """Return whether to query now, or None within 5 s of the last call."""
        now = self._clock()
        if now < self._checked_at + SOONEST_SECONDS:
            return None
        self._checked_at = now
        states, signs = self._read()
        state_changed, advanced = states != self._states, signs != self._signs_of_life
        self._states, self._signs_of_life = states, signs
        if advanced:
            self._active_at, self._active = now, True
        elif self._active and now > self._active_at + QUIET_SECONDS:
            self._active, self._pause = False, SOONEST_SECONDS
        if state_changed:
            self._pause = SOONEST_SECONDS
        elif now < self._queried_at + (LATEST_SECONDS if self._active else self._pause):
            return False
        else:
            self._pause = min(LATEST_SECONDS, 2 * self._pause)
        self._queried_at = now
        return True

    def _read(self) -> tuple[object, object]:
        return [_stat(run.state) for run in self._runs], [
            _stat(path) for run in self._runs for path in _activity_files(run)
        ]


def _activity_files(run: RunDir) -> Iterator[Path]:
    """Yield files that grow, and a folder in which files are replaced, while a run is active."""
    yield run.metrics
    yield run.events
    if attempts := run.attempts():
        latest = attempts[-1]
        yield latest.path / "nodes"  # heartbeats, if there are several nodes
        yield latest.memory(0)
        yield from (latest.rank_log(0, 0, stream) for stream in ("out", "err"))


def _stat(path: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        found = path.stat()
        return found.st_mtime_ns, found.st_size
    return None

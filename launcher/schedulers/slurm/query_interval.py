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

    While the runs are active, that is once a minute. Otherwise the pause grows from 5 s to a minute. If a
    run's own state changes, it is queried at once.
    """

    def __init__(self, runs: Iterable[RunDir], clock: Callable[[], float] = time.monotonic) -> None:
        self._runs, self._clock = list(runs), clock
        self._asked = self._looked = self._lively = clock()
        self._pause, self._lives = SOONEST_SECONDS, False
        self._news, self._life = self._seen()

    def look(self) -> bool | None:
        """Whether to query now; None within 5 s of the last call."""
        now = self._clock()
        if now < self._looked + SOONEST_SECONDS:
            return None
        self._looked = now
        news, life = self._seen()
        changed, advanced = news != self._news, life != self._life
        self._news, self._life = news, life
        if advanced:
            self._lively, self._lives = now, True
        elif self._lives and now > self._lively + QUIET_SECONDS:
            self._lives, self._pause = False, SOONEST_SECONDS
        if changed:
            self._pause = SOONEST_SECONDS
        elif now < self._asked + (LATEST_SECONDS if self._lives else self._pause):
            return False
        else:
            self._pause = min(LATEST_SECONDS, 2 * self._pause)
        self._asked = now
        return True

    def _seen(self) -> tuple[object, object]:
        return [_stat(run.state) for run in self._runs], [
            _stat(path) for run in self._runs for path in _signs(run)
        ]


def _signs(run: RunDir) -> Iterator[Path]:
    """Files that grow, and a folder in which files are replaced, while a run is active."""
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

"""The runs on the screen, in order, with their states and what must be read again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from launcher.api.listing import Filter
from launcher.report.listing import Row, row_of
from launcher.rundir.find import known_roots, runs_in
from launcher.rundir.layout import RunDir
from launcher.schedulers.base import LIVING, Status
from launcher.schedulers.lookup import states_of


@dataclass(frozen=True)
class Entry:
    """A run's status from its scheduler, and its row in `launcher list`."""

    status: Status
    row: Row
    mark: int
    "Modification time of state.json in ns at the time of the query."

    @property
    def ended(self) -> bool:
        return self.status.ended


class Board:
    """Queries schedulers only about live runs, because a run that has ended changes only with its state.json.

    `look` may take long. Call it from one thread at a time.
    """

    def __init__(self, wanted: Filter | None = None, limit: int = 50) -> None:
        self._wanted, self._limit = wanted or Filter(), limit
        self._runs: list[RunDir] = []
        self._roots: dict[Path, int] = {}
        self.entries: dict[RunDir, Entry] = {}
        "Live runs first, each group newest first. It is replaced as a whole, so any thread may read it."

    def look(self) -> None:
        """Find new runs, and query those that may have changed. Raises LauncherError, OSError."""
        if (roots := {root: _modified_at(root) for root in known_roots()}) != self._roots:
            self._runs, self._roots = self._chosen(), roots
        before = self.entries
        marks = {run: mark_of(run) for run in self._runs}
        to_query = [
            run
            for run, mark in marks.items()
            if run not in before or before[run].mark != mark or not before[run].ended
        ]
        fresh = {
            run: Entry(status, row_of(status, run), marks[run]) for run, status in states_of(to_query).items()
        }
        entries = {
            run: fresh.get(run) or before[run] for run in self._runs if run in fresh or run not in to_query
        }
        order = sorted(entries, key=lambda run: entries[run].ended)  # stable: each group stays newest first
        self.entries = {run: entries[run] for run in order}

    def _chosen(self) -> list[RunDir]:
        """Return the live runs and the newest others, `limit` in total."""
        runs = [run for run in runs_in() if self._wanted == Filter() or self._wanted.allows(run.read_about())]
        if len(runs) <= self._limit:
            return runs
        living = {run for run in runs if run.read_state().state in LIVING}
        return sorted(runs, key=lambda run: run not in living)[: self._limit]


def mark_of(run: RunDir) -> int:
    """Return the modification time of state.json in ns, or 0 if it does not exist."""
    return _modified_at(run.state)


def _modified_at(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0

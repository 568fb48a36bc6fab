"""List the runs that this machine knows and that match a filter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from launcher.rundir.find import runs_in
from launcher.rundir.layout import RunDir
from launcher.schedulers.base import Status
from launcher.schedulers.lookup import states_of
from launcher.spec.errors import UsageError
from launcher.spec.records import STATES, RunRecord


@dataclass(frozen=True)
class Filter:
    """What `launcher list` shows. A field that is None allows everything."""

    state: str | None = None
    name: str | None = None
    "The job's name."
    cluster: str | None = None
    tag: str | None = None
    since: str | None = None
    "The earliest submission: `7d` ago, or a UTC time."

    def allows(self, about: RunRecord) -> bool:
        """Return whether run.json matches every field except the state. Raises UsageError."""
        return (
            self.name in (None, about.job.name)
            and self.cluster in (None, about.cluster.name)
            and (self.tag is None or self.tag in (about.job.tags or ()))
            and (self.since is None or about.created >= _stamp(self.since))
        )


@dataclass(frozen=True)
class Listed:
    """The runs that match a filter."""

    statuses: dict[RunDir, Status]
    older: int
    "The number of runs beyond the limit."


def listed(wanted: Filter, limit: int = 0, root: Path | None = None) -> Listed:
    """Find the newest `limit` runs, 0 for all, newest first. Raises UsageError."""
    if wanted.state not in (None, *STATES, "damaged"):
        states_text = ", ".join(sorted({*STATES, "damaged"}))
        raise UsageError(f"{wanted.state!r} is not a state of a run; the states are {states_text}")
    runs = runs_in(root)
    if wanted != Filter(state=wanted.state):
        runs = [run for run in runs if wanted.allows(run.read_about())]
    if wanted.state is not None:  # this needs the state of every run
        states = states_of(runs)
        runs = [run for run, status in states.items() if status.state == wanted.state]
        chosen = runs[: limit or None]
        return Listed({run: states[run] for run in chosen}, len(runs) - len(chosen))
    chosen = runs[: limit or None]
    return Listed(states_of(chosen), len(runs) - len(chosen))


def _stamp(since: str) -> str:
    from launcher.logs.show import parse_since

    try:
        return parse_since(since).decode()
    except ValueError as error:
        raise UsageError(str(error)) from None

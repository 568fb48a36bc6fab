"""Runs, for use in a program or a notebook."""

from __future__ import annotations

import io
import operator
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from launcher.api.given_job import Values, overrides_of
from launcher.api.warn import warn_caller
from launcher.rundir.find import find_run
from launcher.rundir.layout import RunDir
from launcher.schedulers.base import Status
from launcher.schedulers.lookup import fetch_to_read, scheduler_of, states_of, statuses
from launcher.spec.events import CheckpointSaved

if TYPE_CHECKING:
    from launcher.spec.job import Job
    from launcher.spec.verdict import Verdict

FIRST_LOOK, LOOK_SECONDS = 0.2, 5.0
"Pause between two queries about a run that is waited for. It grows from the first to the second value."


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    step: int
    path: str
    "Path on the machine where the run is."


class Metrics(list[dict[str, Any]]):
    """One mapping per step, in order: `step`, `loss`, `lr`, `seconds` and whatever else was recorded."""

    def to_pandas(self) -> Any:
        """Return a DataFrame. Raises ImportError if pandas is not installed."""
        import pandas

        return pandas.DataFrame(list(self))


class Run:
    """A run on this machine, under Slurm, on ssh hosts or on RunPod.

    Each call queries the run again. Raises SchedulerError if the cluster of a run that has not ended does not
    answer. The copy of a run that has ended is read then, with a UserWarning.
    """

    def __init__(self, run: str | Path | RunDir | Run | None = None) -> None:
        """`run` is its id, the beginning or end of the id, its handle or its directory.

        None is the newest run of this project.

        Raises RunNotFoundError.
        """
        self.directory: RunDir
        if isinstance(run, Run | RunDir):
            self.directory = run.directory if isinstance(run, Run) else run
        else:
            self.directory = find_run(str(run) if run is not None else None)

    @property
    def id(self) -> str:
        """The id, such as `gpt-20261121-085401-3fa2`."""
        return self.directory.id

    @property
    def path(self) -> Path:
        """The run directory on this machine. For a run on another machine, a copy of its records."""
        return self.directory.path

    @property
    def handle(self) -> str:
        """The scheduler's name of the run, such as `slurm:della:123456`."""
        return scheduler_of(self.directory).handle(self.directory)

    @property
    def job(self) -> Job:
        """The job in force, with an absolute `workdir`. Raises SpecError if the record is damaged."""
        from launcher.spec.job import Job
        from launcher.spec.load import from_record

        about = self.directory.read_about()
        job = from_record(Job, about.job.as_json(), f"{self.id}/run.json")
        folder = Path(about.job_file or "").parent
        return job.model_copy(update={"workdir": str(folder / job.workdir)})

    def status(self) -> Status:
        """Return state, step, reason: everything that `launcher status` shows."""
        return scheduler_of(self.directory).status(self.directory)

    @property
    def state(self) -> str:
        """The state. A run that is `submitted`, `running` or `stopping` has not ended."""
        return self.status().state

    @property
    def verdict(self) -> Verdict | None:
        """The verdict of the last attempt that has ended, or None if none has."""
        from launcher.report.why import verdicts

        self._fetch()
        found = verdicts(self.directory)
        return found[-1][1] if found else None

    @property
    def verdicts(self) -> list[Verdict]:
        """The verdict of each attempt that has ended."""
        from launcher.report.why import verdicts

        self._fetch()
        return [verdict for _, verdict, _ in verdicts(self.directory)]

    def why(self) -> str:
        """Return the text of `launcher why`: the cause first, then what was done and what to do."""
        from launcher.report.why import why

        return "\n".join(why(self.directory, self.status()))

    def metrics(self) -> Metrics:
        """Return one mapping per step of the built-in entrypoint, or per call of `launcher.log`.

        Steps that a later attempt has repeated are left out.
        """
        self._fetch()
        return Metrics(_in_force(self.directory.metric_lines()))

    def events(self) -> list[dict[str, Any]]:
        """Return the run's events, in order."""
        self._fetch()
        return [event.as_json() for event in self.directory.read_events()]

    def logs(
        self,
        rank: int | Iterable[int] | None = None,
        *,
        node: int | Iterable[int] | None = None,
        attempt: int | None = None,
        stream: Literal["both", "out", "err"] = "both",
        grep: str | None = None,
    ) -> str:
        """Return the lines of all or the given ranks, merged by time, as `launcher logs` prints them.

        Raises ValueError for a rank, node or attempt that does not exist or has not printed anything yet, and
        for a `grep` that is not a regular expression.
        """
        if stream not in ("both", "out", "err"):
            raise ValueError(f"stream: {stream!r} is not one of both, out, err")
        from launcher.logs.show import LogOptions, show_logs
        from launcher.schedulers.wanted_files import Wanted

        ranks, nodes = _numbers(rank), _numbers(node)
        self._fetch(Wanted(logs=True, ranks=ranks, nodes=nodes))
        options = LogOptions(
            attempt=attempt, ranks=_text(ranks), nodes=_text(nodes), grep=grep, streams=stream, fold=False
        )
        out = io.BytesIO()
        show_logs(self.directory, options, out, colour=False)
        return out.getvalue().decode(errors="replace")

    def checkpoints(self) -> list[Checkpoint]:
        """Return the complete checkpoints, oldest first. For a run elsewhere, those that it has reported."""
        self._fetch()
        folder = self.directory.checkpoints
        if folder.is_dir():
            entries = [(entry.name.partition("-")[2], str(entry)) for entry in folder.glob("step-*")]
            return [Checkpoint(int(step), path) for step, path in sorted(entries) if step.isdecimal()]
        events = self.directory.read_events()
        saved = {event.step: str(event.path) for event in events if isinstance(event, CheckpointSaved)}
        return [Checkpoint(step, path) for step, path in sorted(saved.items())]

    def wait(self, timeout: float | None = None) -> Status:
        """Wait until the run has ended, successfully or not.

        Raises TimeoutError after `timeout` seconds; the run continues.
        """
        began, pause = time.monotonic(), FIRST_LOOK
        while not (now := self.status()).ended:
            left = timeout - (time.monotonic() - began) if timeout is not None else pause
            if left <= 0:
                raise TimeoutError(f"{self.id} is still {now.state} after {timeout:g} s")
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, LOOK_SECONDS)
        return now

    def cancel(self) -> None:
        """Ask the run to write a checkpoint and stop. A second call ends the ranks at once.

        Returns before the run has ended; use `wait()` for that. Raises SchedulerError if it has ended
        already.
        """
        scheduler_of(self.directory).cancel(self.directory)

    def resume(self, *, set: Values | Sequence[str] | None = None, cluster: str | None = None) -> Run:
        """Continue from the last checkpoint, and return this run.

        `set` and `cluster` change what is left of the run, which is then planned again. Raises SchedulerError
        if the run has not ended or cannot be resumed, SpecError, PlanRefusedError.
        """
        from launcher.api.resume import resume

        resume(self.directory, overrides_of(set), cluster)
        return self

    def _fetch(self, wanted: Any = None) -> None:
        if outdated := fetch_to_read(self.directory, wanted):
            warn_caller([outdated])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and other.path == self.path

    def __hash__(self) -> int:
        return hash(self.path)

    def __repr__(self) -> str:
        status = self.status()
        of_steps = f" of {status.steps}" if status.steps else ""
        step = "" if status.step is None else f", step {status.step}{of_steps}"
        return f"<Run {self.id}: {status.state}{step}{f': {status.reason}' if status.reason else ''}>"

    def _repr_html_(self) -> str:
        return Runs([self])._repr_html_()


class Runs(Sequence[Run]):
    """Several runs, newest first, or a sweep's in the order of its values.

    Their states are queried together.
    """

    def __init__(self, runs: Iterable[Run]) -> None:
        self._runs = tuple(runs)

    def statuses(self) -> list[Status]:
        """Return the status of each run in order. A run whose directory was deleted is `lost`."""
        return statuses(run.directory for run in self._runs)

    def wait(self, timeout: float | None = None) -> list[Status]:
        """Wait until all have ended. Raises TimeoutError."""
        began = time.monotonic()
        return [
            run.wait(None if timeout is None else max(0.0, timeout - (time.monotonic() - began)))
            for run in self._runs
        ]

    def cancel(self) -> None:
        """Cancel every run that has not ended, as `Run.cancel` does.

        Raises SchedulerError if all have ended.
        """
        from launcher.schedulers.lookup import cancel_all

        cancel_all([run.directory for run in self._runs], "these runs")

    def compare(self, by: str | None = None) -> Any:
        """Return a DataFrame with a row for each run: `state`, the settings that differ, the results.

        `by` sorts by one of them, the best first. Raises ImportError if pandas is not installed, and
        UsageError if no run has `by`.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError(f"{error}; pip install pandas, or use `launcher compare --json`") from None
        from launcher.api.compare import compared

        rows = compared((run.directory for run in self._runs), by).rows()
        return pandas.DataFrame(rows).set_index("run")

    @overload
    def __getitem__(self, index: int) -> Run: ...
    @overload
    def __getitem__(self, index: slice) -> Runs: ...
    def __getitem__(self, index: int | slice) -> Run | Runs:
        return Runs(self._runs[index]) if isinstance(index, slice) else self._runs[index]

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs)

    def __repr__(self) -> str:
        return "\n".join(f"{status.run_id}  {status.state}" for status in self.statuses()) or "no runs"

    def _repr_html_(self) -> str:
        from launcher.report.listing import as_html, row_of

        statuses_by_run = states_of(run.directory for run in self._runs)
        return as_html([row_of(status, run) for run, status in statuses_by_run.items()])


def _numbers(given: int | Iterable[int] | None) -> frozenset[int] | None:
    if given is None:
        return None
    values = given if isinstance(given, Iterable) else (given,)
    return frozenset(map(operator.index, values))  # accepts integers of numpy, and no text


def _text(numbers: frozenset[int] | None) -> str | None:
    return None if numbers is None else ",".join(map(str, sorted(numbers)))


def _in_force(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines without those of steps that a later attempt has repeated."""
    kept: list[dict[str, Any]] = []
    for line in lines:
        while kept and kept[-1]["attempt"] < line["attempt"] and kept[-1]["step"] >= line["step"]:
            kept.pop()
        kept.append(line)
    return kept

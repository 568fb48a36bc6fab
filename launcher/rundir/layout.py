"""The paths of everything in a run directory, which is the only state that launcher shares."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.rundir.files import append_json, json_lines, read_json, read_json_lines, read_record
from launcher.rundir.record_forms import METRIC, fits
from launcher.rundir.time import now
from launcher.spec import variables
from launcher.spec.events import Event, read_event
from launcher.spec.records import RunRecord, StateRecord

if TYPE_CHECKING:
    from launcher.spec.verdict import Judged


@dataclass(frozen=True)
class AttemptDir:
    """`attempts/003/`: one start of all workers with one Recipe."""

    path: Path

    @property
    def number(self) -> int:
        return int(self.path.name.partition("-")[0])

    @property
    def only_saves(self) -> bool:
        """Whether this is not the attempt itself but its `RunDir.saving`."""
        return self.path.name.endswith("-save")

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.json"

    @property
    def verdict(self) -> Path:
        return self.path / "verdict.json"

    def read_verdict(self) -> Judged | None:
        """The attempt's verdict; None if it is not judged yet, or if the record is damaged."""
        from launcher.spec.verdict import Judged  # pydantic: the worker of each rank imports this module

        return Judged.read(read_json(self.verdict))

    @property
    def stop(self) -> Path:
        """Exists if the ranks are asked to write a checkpoint and end."""
        return self.path / "stop"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def rank_log(self, node: int, rank: int, stream: str) -> Path:
        """`stream` is `out` or `err`."""
        return self.logs / f"node-{node:02d}" / f"rank-{rank:03d}.{stream}"

    def error(self, rank: int) -> Path:
        """Written by a rank that knows why it failed."""
        return self.path / "errors" / f"rank-{rank:03d}.json"

    def exit(self, rank: int) -> Path:
        """Written by the process that watched the rank, for every rank that ended."""
        return self.path / "exits" / f"rank-{rank:03d}.json"

    def memory(self, rank: int) -> Path:
        """The rank's memory after each step, as one line of JSON per step."""
        return self.path / "memory" / f"rank-{rank:03d}.jsonl"

    @property
    def first_step(self) -> Path:
        """{kind of a framework's log: number of the first step of the training there, 0 or 1}."""
        return self.path / "first-step.json"

    @property
    def snapshot_request(self) -> Path:
        """The latest request for a memory snapshot: its time, and the rank (null for all)."""
        return self.path / "snapshot.json"

    def snapshot(self, rank: int, step: int | None, suffix: str) -> Path:
        """A memory snapshot of one step, or of the moment memory ran out if `step` is None."""
        moment = "oom" if step is None else f"step-{step}"
        return self.path / "memory" / f"rank-{rank:03d}-{moment}.{suffix}"

    def oom_snapshot(self, rank: int) -> Path | None:
        """The rank's snapshot of the moment memory ran out, in the format of its device."""
        return next((self.path / "memory").glob(f"rank-{rank:03d}-oom.*"), None)

    def torchrun_log(self, node: int) -> Path:
        return self.logs / f"node-{node:02d}" / "torchrun.err"


@dataclass(frozen=True)
class RunDir:
    """`runs/<run-id>/`."""

    path: Path

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def submitted(self) -> Path:
        """run.json as it was submitted: written once."""
        return self.path / "run.json"

    @property
    def run(self) -> Path:
        return self._in_force / "run.json"

    @property
    def plan(self) -> Path:
        return self._in_force / "plan.json"

    @property
    def scripts(self) -> Path:
        return self._in_force / "scripts"

    def plan_from(self, attempt: int) -> Path:
        """`plans/003/`: run.json, plan.json and scripts/ in force from attempt 3 on, if a run was resumed
        with another job. It appears completely, by a rename."""
        return self.path / "plans" / f"{attempt:03d}"

    @property
    def planned_at(self) -> int:
        """The first attempt of the plan in force."""
        return max(self._plans(), default=0)

    @property
    def _in_force(self) -> Path:
        plans = self._plans()
        return self.plan_from(max(plans)) if plans else self.path

    def _plans(self) -> list[int]:
        folder = self.path / "plans"
        entries = list(folder.iterdir()) if folder.is_dir() else []
        # A withdrawn plan may leave its empty folder on another machine.
        return [int(plan.name) for plan in entries if plan.name.isdecimal() and (plan / "run.json").exists()]

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def state(self) -> Path:
        return self.path / "state.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def report(self) -> Path:
        """The page about the run."""
        return self.path / "report.html"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def closed(self) -> Path:
        """Node 0 writes it to tell the others that no attempt follows."""
        return self.path / "closed.json"

    @property
    def cancel(self) -> Path:
        """Exists if a user cancelled the run, and so distinguishes a cancellation from a preemption."""
        return self.path / "cancel"

    @property
    def supervisor_lock(self) -> Path:
        """Locked (flock) by the living supervisor; the kernel releases it when the supervisor dies."""
        return self.path / "supervisor.lock"

    @property
    def supervisor_log(self) -> Path:
        return self.path / "supervisor.log"

    def attempt(self, number: int) -> AttemptDir:
        return AttemptDir(self.path / "attempts" / f"{number:03d}")

    def saving(self, number: int) -> AttemptDir:
        """`attempts/003-save/`: another start of the ranks of attempt 3, which ended the run.

        They write the state that it left in shared memory as a checkpoint. `attempts` does not list it.
        """
        return AttemptDir(self.path / "attempts" / f"{number:03d}-save")

    def started(self, environ: Mapping[str, str]) -> AttemptDir:
        """The folder of the attempt that a rank belongs to, from the rank's environment."""
        number = int(environ.get(variables.ATTEMPT, "0"))
        return self.saving(number) if environ.get(variables.ONLY_SAVE) else self.attempt(number)

    def attempts(self) -> list[AttemptDir]:
        """Every attempt, in order of start."""
        return [attempt for attempt in self.starts() if not attempt.only_saves]

    def starts(self) -> list[AttemptDir]:
        """Every attempt and every `saving`, in order of start."""
        folder = self.path / "attempts"
        if not folder.is_dir():
            return []
        names = (entry.name for entry in folder.iterdir())
        return [AttemptDir(folder / name) for name in sorted(names) if name.removesuffix("-save").isdecimal()]

    def read_about(self) -> RunRecord:
        """run.json of the job in force; empty if it is missing or damaged."""
        return RunRecord.read(read_json(self.run)) or RunRecord()

    @property
    def damage(self) -> str:
        """Why run.json cannot be used and what to do; "" if it can."""
        if self.read_about().cluster.scheduler is not None:
            return ""
        if not self.path.exists():
            return f"{self.path} was deleted"
        return (
            f"{self.run} cannot be read: it is not as launcher wrote it; restore it from a backup, "
            f"or delete the run: rm -r {shlex.quote(str(self.path))}"
        )

    def read_recipe(self, attempt: AttemptDir) -> dict[str, Any]:
        """The attempt's recipe.

        If start.sh runs by hand as attempt 0, none was written, and it is the plan's.
        """
        recipe = read_record(attempt.recipe)
        if not recipe and attempt.number == 0:
            recipe = read_record(self.plan).get("recipe", {})
        return recipe

    def read_state(self) -> StateRecord:
        """state.json; empty if it is missing or damaged."""
        return StateRecord.read(read_json(self.state)) or StateRecord()

    def read_events(self) -> list[Event]:
        """The events in order, without lines of another form."""
        events = map(read_event, read_json_lines(self.events))
        return [event for event in events if event is not None]

    def metric_lines(self) -> Iterator[dict[str, Any]]:
        """One mapping per step of the built-in entrypoint, in order, without lines of another form."""
        return (line for line in json_lines(self.metrics) if fits(line, METRIC))

    def read_metrics(self) -> list[dict[str, Any]]:
        """The same as a list. A long run has millions of lines."""
        return list(self.metric_lines())

    def append(self, event: Event) -> None:
        """Write an event now. Raises OSError on a full disk."""
        append_json(self.events, {"time": now(), **event.as_json()})

    def event(self, kind: str, **fields: Any) -> None:
        """Write an event by the name of its kind, for schedulers of other packages.

        Raises OSError on a full disk.
        """
        self.append(Event.of({"event": kind, **fields}))

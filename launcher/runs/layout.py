"""Where everything of a run lies. The run directory is the only state that launcher shares."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.runs.files import append_json, read_json_lines, read_record
from launcher.runs.time import now


@dataclass(frozen=True)
class AttemptDir:
    """`attempts/003/`: one start of all workers with one Recipe."""

    path: Path

    @property
    def number(self) -> int:
        return int(self.path.name)

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.json"

    @property
    def verdict(self) -> Path:
        return self.path / "verdict.json"

    @property
    def stop(self) -> Path:
        """Exists when the ranks are asked to write a checkpoint and end."""
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
        """What the rank's memory held after each step, one line of JSON per step."""
        return self.path / "memory" / f"rank-{rank:03d}.jsonl"

    @property
    def snapshot_request(self) -> Path:
        """The latest request for a memory snapshot: when it was made, and of which rank (null: of all)."""
        return self.path / "snapshot.json"

    def snapshot(self, rank: int, step: int | None, suffix: str) -> Path:
        """A memory snapshot of one step; of the moment memory ran out when `step` is None."""
        moment = "oom" if step is None else f"step-{step}"
        return self.path / "memory" / f"rank-{rank:03d}-{moment}.{suffix}"

    def oom_snapshot(self, rank: int) -> Path | None:
        """What the rank wrote when memory ran out, in whichever form its device has."""
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
        """`plans/003/`: run.json, plan.json and scripts/ that are in force from attempt 3 on, where a run
        was resumed with another job. It appears whole, by a rename."""
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
        names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
        return [int(name) for name in names if name.isdigit()]

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
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def cancel(self) -> Path:
        """Exists when somebody cancelled the run; tells a cancellation from a preemption."""
        return self.path / "cancel"

    @property
    def supervisor_lock(self) -> Path:
        """Held (flock) by the living supervisor; the kernel lets go when it dies."""
        return self.path / "supervisor.lock"

    @property
    def supervisor_log(self) -> Path:
        return self.path / "supervisor.log"

    def attempt(self, number: int) -> AttemptDir:
        return AttemptDir(self.path / "attempts" / f"{number:03d}")

    def attempts(self) -> list[AttemptDir]:
        """In order of start."""
        folder = self.path / "attempts"
        if not folder.is_dir():
            return []
        names = sorted(entry.name for entry in folder.iterdir() if entry.name.isdigit())
        return [AttemptDir(folder / name) for name in names]

    def read_about(self) -> dict[str, Any]:
        """run.json of the job in force."""
        return read_record(self.run)

    def read_recipe(self, attempt: AttemptDir) -> dict[str, Any]:
        """The attempt's recipe; when start.sh runs by hand as attempt 0, nobody wrote one: the plan's."""
        recipe = read_record(attempt.recipe)
        if not recipe and attempt.number == 0:
            recipe = read_record(self.plan).get("recipe", {})
        return recipe

    def read_state(self) -> dict[str, Any]:
        return read_record(self.state)

    def read_events(self) -> list[dict[str, Any]]:
        return read_json_lines(self.events)

    def event(self, kind: str, **fields: Any) -> None:
        """Append to `events.jsonl`. Raises OSError on a full disk."""
        append_json(self.events, {"time": now(), "event": kind, **fields})

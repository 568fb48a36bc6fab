"""The real CLI in a process of its own, the real supervisor, real ranks."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from launcher.rundir.layout import RunDir
from launcher.spec.events import Event, read_event
from tests import warm

PATIENCE = 240.0
"""Seconds after which a test gives up waiting. Only a hang takes as long, on a busy machine too: a test is
about what happens, not about how fast."""


ENDED = ("succeeded", "failed", "cancelled", "interrupted", "lost")


def verb(
    *arguments: str, folder: Path, environ: Mapping[str, str], timeout: float = PATIENCE, fresh: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run `launcher` to its end in a forked process, or in a new interpreter if it is to be `fresh`."""
    program = warm.Program(True, ["launcher", *arguments], environ, folder, fresh)
    return warm.run(program, timeout)


class Lab:
    """A user's project folder, and what a user can do in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fresh = False
        "Each verb is a new interpreter: the environment gives it another launcher."
        self.environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("LAUNCHER_")},
            "XDG_STATE_HOME": str(folder / "state"),
            "XDG_CONFIG_HOME": str(folder / "config"),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
        }

    def job(self, name: str = "job.yaml", /, **fields: Any) -> Path:
        """Write a job file: two ranks on the CPU unless the fields say otherwise."""
        base = {
            "name": "e2e",
            "batch": {"global": 8},
            "resources": {"gpus_per_node": 0, "ranks_per_node": 2},
            "recipe": {"sharding": "ddp"},
        }
        YAML().dump({**base, **fields}, self.folder / name)
        return self.folder / name

    def script(self, text: str, name: str = "train.py") -> Path:
        (self.folder / name).write_text(text)
        return self.folder / name

    def cli(self, *arguments: str, timeout: float = PATIENCE) -> subprocess.CompletedProcess[str]:
        return verb(*arguments, folder=self.folder, environ=self.environ, timeout=timeout, fresh=self.fresh)

    def json(self, *arguments: str, code: int = 0) -> Any:
        """The JSON that a command prints; what it says beside it is on stderr."""
        done = self.cli(*arguments, "--json")
        assert done.returncode == code, done.stdout + done.stderr
        return json.loads(done.stdout)

    def submit(self, *arguments: str) -> RunDir:
        """Start detached; fails the test when the CLI does."""
        done = self.cli("submit", *arguments)
        assert done.returncode == 0, done
        return self.newest()

    def newest(self) -> RunDir:
        return RunDir(Path(json.loads(self.cli("list", "--json", "--limit", "1").stdout)[0]["path"]))

    def status(self, run: RunDir) -> dict[str, Any]:
        return json.loads(self.cli("status", str(run.path), "--json").stdout)

    def wait(self, run: RunDir, *states: str, timeout: float = PATIENCE) -> dict[str, Any]:
        """Until the run is in one of the states (any ended one by default).

        `launcher status` is a process: it is asked when state.json says so, and now and then, since nobody
        writes there that a run is lost or was cancelled in a queue, and what it has of a run elsewhere is a
        copy.
        """
        wanted = states or ENDED
        asked = time.monotonic()
        deadline = asked + timeout
        while time.monotonic() < deadline:
            if run.read_state().state in wanted or time.monotonic() > asked + 3:
                status = self.status(run)
                if status["state"] in wanted:
                    return status
                asked = time.monotonic()
            time.sleep(0.1)
        raise AssertionError(f"not {wanted} after {timeout} s: {self.status(run)}\n{self.all_logs(run)}")

    def all_logs(self, run: RunDir) -> str:
        files = [run.supervisor_log, *sorted(run.path.glob("attempts/*/logs/*/*"))]
        return "\n".join(
            f"--- {file}\n{file.read_text(errors='replace')[-3000:]}" for file in files if file.exists()
        )


HELD = """
import os, pathlib, time
from launcher.tasks.gpt import PydocGPT

RUN = pathlib.Path(os.environ["LAUNCHER_RUN_DIR"])

class Held(PydocGPT):
    def loss(self, model, batch):
        (RUN / "held").touch()
        while not (RUN / "go").exists():
            time.sleep(0.02)
        return super().loss(model, batch)
"""
"A task whose first step lasts until there is a file `go` in the run directory."
HELD_JOB = {
    "task": "held:Held",
    "args": {"layers": 1, "dim": 32, "heads": 2, "context": 32},
    "steps": 500,
    "train": {"checkpoint_every": None, "lr": 1e-3},
}


def wait_for(condition: Callable[[], Any], what: str, timeout: float = PATIENCE) -> Any:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):
            if value := condition():
                return value
        time.sleep(0.05)
    raise AssertionError(f"no {what} after {timeout} s")


def as_events(lines: Iterable[dict[str, Any]]) -> list[Event]:
    """Return these lines of events.jsonl as events."""
    read = [read_event(line) for line in lines]
    assert None not in read
    return [event for event in read if event is not None]


def events(run: RunDir, kind: str) -> list[dict[str, Any]]:
    return [event.as_json() for event in run.read_events() if event.kind == kind]


def verdicts(run: RunDir) -> list[dict[str, Any]]:
    return [json.loads(attempt.verdict.read_text()) for attempt in run.attempts()]


def supervisor_pid(run: RunDir) -> int:
    return int(json.loads(run.supervisor_lock.read_text())["pid"])


def merged_steps(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line for each step: of lines of one step and attempt, and without repeated steps."""
    kept: list[dict[str, Any]] = []
    for line in lines:
        if kept and (kept[-1]["attempt"], kept[-1]["step"]) == (line["attempt"], line["step"]):
            line = {**kept[-1], **line}
        kept = [one for one in kept if one["step"] < line["step"]] + [line]
    return kept


def metrics(run: RunDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]

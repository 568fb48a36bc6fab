"""What a run's records and the lock of its supervisor say together."""

from __future__ import annotations

import fcntl
import subprocess
from pathlib import Path

import pytest

from launcher.rundir.files import append_json, replace_json
from launcher.rundir.layout import RunDir
from launcher.rundir.time import stamp
from launcher.schedulers.ssh.state import corrected_state, locks_script, parse_locks


def run_with(folder: Path, state: str, asked: float = 0.0) -> RunDir:
    run = RunDir(folder / "a run")
    run.path.mkdir()
    replace_json(run.state, {"state": state, "attempt": 0})
    append_json(run.events, {"time": stamp(asked), "event": "submitting"})
    return run


@pytest.mark.parametrize(
    ("state", "lock", "trouble", "seen"),
    [
        ("running", "held", "", "running"),
        ("running", "free", "", "lost"),
        ("stopping", "free", "", "lost"),
        ("running", "lost", "", "lost"),
        ("running", "unknown", "", "running"),
        ("running", "", "no connection", "running"),
        ("succeeded", "free", "", "succeeded"),
        ("cancelled", "", "no connection", "cancelled"),
        ("submitted", "held", "", "submitted"),
        ("submitted", "none", "", "lost"),
        ("submitted", "", "no connection", "submitted"),
    ],
)
def test_only_a_lock_that_was_let_go_makes_a_living_run_lost(
    tmp_path: Path, state: str, lock: str, trouble: str, seen: str
) -> None:
    told = corrected_state(run_with(tmp_path, state), lock, trouble, "tensor01:/runs/a run")
    assert told.state == seen and told.attempt == 0
    assert (told.failure == "node-failed") == (seen == "lost")
    if trouble and seen in ("running", "submitted"):
        assert told.reason == "last known state; no connection"


def test_an_earlier_success_is_not_the_end_of_a_run_that_was_resumed_since(tmp_path: Path) -> None:
    run = run_with(tmp_path, "running")
    recipe = {"micro_batch_size": 1, "grad_accum": 1}
    append_json(run.events, {"time": stamp(1), "event": "attempt", "attempt": 0, "recipe": recipe})
    run.attempt(0).path.mkdir(parents=True)
    replace_json(run.attempt(0).verdict, {"failure": "succeeded", "reason": "it trained"})
    assert corrected_state(run, "free", "", "").state == "succeeded", "state.json could not be written"
    append_json(run.events, {"time": stamp(2), "event": "submitting"})
    replace_json(run.state, {"state": "submitted"})
    assert corrected_state(run, "free", "", "").state == "lost"


def test_a_run_that_is_just_being_submitted_is_not_lost(tmp_path: Path) -> None:
    import time

    run = run_with(tmp_path, "submitted", asked=time.time() - 30)
    assert corrected_state(run, "none", "", "").state == "submitted"


def test_the_locks_of_many_runs_are_told_by_one_script(tmp_path: Path) -> None:
    for name, record in (("held", "{}"), ("free", "{}"), ("it's empty", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "supervisor.lock").write_text(record)
    runs = ["held", "free", "it's empty", "away"]
    with open(tmp_path / "held/supervisor.lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        script = locks_script(str(tmp_path), runs)
        done = subprocess.run(["sh", "-c", script], capture_output=True, check=True)
    told = {"held": "held", "free": "free", "it's empty": "none", "away": "none"}
    assert parse_locks(done.stdout) == told and not (tmp_path / "away").exists()

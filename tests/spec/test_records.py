"""run.json, state.json and verdict.json as values, of any version."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.rundir.layout import RunDir
from launcher.spec.verdict import Verdict

ABOUT = {
    "id": "run-1",
    "created": "2026-11-21T08:54:01Z",
    "job": {"name": "demo", "task": "a:B", "steps": 3, "of_another_version": True},
    "cluster": {"name": "here", "scheduler": "local", "ssh": None},
    "sweep": {"id": "sweep-1", "values": ["lr=1"]},
}


def run_of(folder: Path, **files: Any) -> RunDir:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return RunDir(folder)


def test_a_run_is_read_by_its_fields_and_keeps_everything_it_says(tmp_path: Path) -> None:
    about = run_of(tmp_path, run=ABOUT).read_about()
    assert (about.id, about.job.name, about.job.steps, about.cluster.scheduler) == (
        "run-1",
        "demo",
        3,
        "local",
    )
    assert about.sweep is not None and about.sweep.id == "sweep-1" and about.cluster.ssh is None
    assert about.as_json() == ABOUT and about.job.as_json()["of_another_version"] is True


@pytest.mark.parametrize("damaged", [5, {"job": 5}, {"cluster": {"ssh": {}}}, {"sweep": 5}, {"id": ["x"]}])
def test_a_damaged_run_is_empty(tmp_path: Path, damaged: object) -> None:
    about = run_of(tmp_path, run=damaged).read_about()
    assert about.as_json() == {} and (about.id, about.job.name, about.cluster.name) == (None, None, None)


def test_a_null_job_is_an_empty_one(tmp_path: Path) -> None:
    about = run_of(tmp_path, run={**ABOUT, "job": None}).read_about()
    assert about.id == "run-1" and about.job.as_json() == {} and about.job.task is None


def test_a_state_of_another_form_is_empty(tmp_path: Path) -> None:
    state = run_of(tmp_path, state={"state": "running", "attempt": 2, "pid": 7}).read_state()
    assert (state.state, state.attempt, state.reason, state.as_json()["pid"]) == ("running", 2, "", 7)
    assert run_of(tmp_path, state={"state": "of another version"}).read_state().as_json() == {}
    assert run_of(tmp_path, state={"state": "running", "attempt": "2"}).read_state().as_json() == {}


def test_a_verdict_of_a_newer_version_is_read_without_what_it_says_besides(tmp_path: Path) -> None:
    attempt = RunDir(tmp_path).attempt(0)
    assert attempt.read_verdict() is None
    attempt.path.mkdir(parents=True)
    verdict = Verdict(failure="user-error", reason="it raised", rank=1)
    said = {**verdict.model_dump(), "then": "it ends", "of_another_version": 1}
    attempt.verdict.write_text(json.dumps(said))
    judged = attempt.read_verdict()
    assert judged is not None and judged.verdict == verdict and judged.then == "it ends"
    attempt.verdict.write_text(json.dumps({**said, "failure": "of another version"}))
    assert attempt.read_verdict() is None

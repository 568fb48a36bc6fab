"""Cancelling while the volume cannot be reached: no pod is ended on what was known before."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

pytest.importorskip("starlette")
pytest.importorskip("boto3")

from launcher.cli.main import app
from launcher.cli.runs import clean
from launcher.rundir.layout import RunDir
from launcher.schedulers.base import SchedulerError
from tests.lab import wait_for
from tests.schedulers.runpod.runs import Lab

AWAY = {"p": 1}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request is tried five times, without the pauses of seconds."""
    pause = "botocore.retries.standard.ExponentialBackoff.delay_amount"
    monkeypatch.setattr(pause, lambda *_: 0.01)


@pytest.mark.slow
def test_a_run_that_has_begun_again_unseen_goes_on_when_it_cannot_be_asked_to_stop(lab: Lab) -> None:
    run = lab.submit(lab.prepare())
    lab.until(run, "running")
    lab.scheduler.cancel(run)
    lab.until(run, "cancelled")
    lab.no_pods(run)
    lab.scheduler.resume(run)
    there = lab.there(run) / "state.json"
    wait_for(lambda: json.loads(there.read_text())["state"] == "running", "the run")
    assert run.read_state().state == "submitted", "as it was known last"
    lab.sandbox.faults(s3_error=AWAY)
    with pytest.raises(SchedulerError, match="was not asked to stop and keeps running: cancel it again"):
        lab.scheduler.cancel(run)
    assert not run.cancel.exists() and len(lab.pods(run)) == 1
    lab.sandbox.faults()
    assert lab.look(run).state == "running" and not (lab.there(run) / "cancel").exists()
    lab.scheduler.cancel(run)
    assert lab.until(run, "cancelled").exit_code == 18
    lab.no_pods(run)


def test_whether_a_run_has_begun_is_read_before_its_pod_is_ended(lab: Lab) -> None:
    lab.sandbox.faults(slow_pull={"p": 1, "value": 60, "times": 1})
    run = lab.submit(lab.prepare())
    lab.sandbox.faults(s3_error={**AWAY, "on": "(GET|HEAD) /"})
    with pytest.raises(SchedulerError, match="the request to stop is sent anyway"):
        lab.scheduler.cancel(run)
    assert (lab.there(run) / "cancel").exists() and len(lab.pods(run)) == 1
    lab.sandbox.faults()
    lab.scheduler.cancel(run)
    assert lab.look(run).failure == "cancelled"
    lab.no_pods(run)


def test_what_was_done_is_told(lab: Lab) -> None:
    def said(run: RunDir) -> str:
        return CliRunner().invoke(app, ("cancel", run.id)).output.strip()

    lab.sandbox.faults(slow_pull={"p": 1, "value": 60})
    run = lab.submit(lab.prepare())
    assert said(run) == f"{run.id}: cancelled before it began: its pod was ended"
    lab.no_pods(run)
    (lab.there(run) / "attempts" / "000").mkdir(parents=True)
    (lab.there(run) / "attempts" / "000" / "verdict.json").write_text("{}")
    lab.scheduler.resume(run)
    assert said(run) == f"{run.id}: cancelled before it went on: its pod was ended"
    assert lab.look(run).reason == "cancelled before it went on: its pod was ended"
    lab.sandbox.faults()
    lab.scheduler.resume(run)
    lab.until(run, "running")
    assert said(run).startswith(f"{run.id}: its script is asked to stop by SIGTERM; ")
    lab.until(run, "cancelled")
    clean([run.id], yes=True)
    assert not run.path.exists()

"""Resumes with another job that fail on the way: the run keeps the plan that its next pod runs with."""

from __future__ import annotations

import json
import os

import pytest

pytest.importorskip("starlette")
pytest.importorskip("boto3")

from launcher.api.resubmission import prepared_again
from launcher.api.resume import resume
from launcher.rundir.find import RunNotFoundError, find_run
from launcher.rundir.layout import RunDir
from launcher.schedulers.base import SchedulerError, UnclearError
from launcher.schedulers.runpod.mirror import Copy
from launcher.schedulers.runpod.scheduler import RunPodScheduler
from launcher.schedulers.runpod.volume import VolumeError
from tests.schedulers.runpod.runs import Lab


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request is tried five times, without the pauses of seconds."""
    pause = "botocore.retries.standard.ExponentialBackoff.delay_amount"
    monkeypatch.setattr(pause, lambda *_: 0.01)


def cancelled(lab: Lab) -> RunDir:
    run = lab.submit(lab.prepare())
    lab.until(run, "running")
    lab.scheduler.cancel(run)
    lab.until(run, "cancelled")
    lab.no_pods(run)
    return run


def started_with(run: RunDir) -> str:
    return (run.scripts / "start.sh").read_text()


def test_changes_that_no_pod_was_rented_for_are_gone_on_the_volume_too(lab: Lab) -> None:
    run = cancelled(lab)
    lab.sandbox.faults(no_capacity=1)
    with pytest.raises(SchedulerError, match="no longer any instances"):
        lab.scheduler.resume(run, prepared_again(run, ["env.NEW=1"], None))
    lab.sandbox.faults()
    there = RunDir(lab.there(run))
    assert "NEW" not in started_with(there), "it was sent before a pod was asked for"
    assert there.read_state().state == "cancelled" and there.cancel.exists()
    lab.scheduler.resume(run)
    lab.until(run, "running")
    assert "NEW" not in started_with(there) and "NEW" not in started_with(run)


def test_a_pod_that_is_found_late_has_the_changes_that_it_was_asked_for_with(lab: Lab) -> None:
    run = cancelled(lab)
    lab.sandbox.faults(
        lost_response={"p": 1, "on": "POST /(v2/pods|graphql)$"}, unlisted={"p": 1, "value": 8}
    )
    with pytest.raises(UnclearError):
        lab.scheduler.resume(run, prepared_again(run, ["env.NEW=1"], None))
    lab.sandbox.faults()
    lab.until(run, "running")
    assert "NEW" in started_with(RunDir(lab.there(run))) and "NEW" in started_with(run)


@pytest.mark.parametrize("at", [(RunPodScheduler, "_send_code"), (Copy, "push")], ids=["code", "records"])
def test_ctrl_c_before_a_pod_is_asked_for_takes_everything_back(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, at: tuple[type, str]
) -> None:
    run, ready, there = cancelled(lab), lab.prepare(), getattr(*at)
    sent: list[object] = []

    def interrupted(*arguments: object) -> None:
        there(*arguments)
        sent.append(arguments)
        if len(sent) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(*at, interrupted)
    with pytest.raises(KeyboardInterrupt):
        lab.scheduler.resume(run, prepared_again(run, ["env.NEW=1"], None))
    assert "NEW" not in started_with(run) and lab.look(run).state == "cancelled"
    on_volume = RunDir(lab.there(run))
    assert "NEW" not in started_with(on_volume) and on_volume.cancel.exists()
    assert on_volume.read_state().state == "cancelled"
    sent.clear()
    with pytest.raises(KeyboardInterrupt):
        lab.submit(ready)
    with pytest.raises(RunNotFoundError):
        find_run(ready.request.run_id)


@pytest.mark.parametrize("asked", [False, True], ids=["before the request", "no pod ever comes"])
def test_changes_that_the_run_never_started_with_are_gone_at_the_next_resume(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    run = cancelled(lab)
    if asked:
        lab.sandbox.faults(server_error={"p": 1, "on": "POST /(v2/pods|graphql)$"})
        with pytest.raises(UnclearError):
            resume(run, ["env.NEW=1"])
        lab.sandbox.faults()
        assert "RunPod never answered" in lab.until(run, "lost").reason
    else:
        if (child := os.fork()) == 0:
            monkeypatch.setattr(Copy, "push", lambda _: os._exit(9))
            resume(run, ["env.NEW=1"])
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        lab.until(run, "lost")
    assert "NEW" in started_with(run)
    resume(run)
    lab.until(run, "running")
    assert "NEW" not in started_with(RunDir(lab.there(run))) and "NEW" not in started_with(run)


def test_a_run_whose_records_could_not_all_be_sent_ends_as_it_had(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = cancelled(lab)
    once = [Copy.push]

    def push(copy: Copy) -> None:
        if not once:
            raise VolumeError("the volume does not answer any more")
        once.pop()(copy)

    monkeypatch.setattr(Copy, "push", push)
    lab.sandbox.faults(s3_error={"p": 1, "on": "PUT .*scripts"})
    with pytest.raises(SchedulerError, match=r"put_object .*scripts.*injected"):
        lab.scheduler.resume(run)
    lab.sandbox.faults()
    assert json.loads((lab.there(run) / "state.json").read_text())["state"] == "submitted"
    assert lab.look(run).state == "cancelled", "nothing was rented"

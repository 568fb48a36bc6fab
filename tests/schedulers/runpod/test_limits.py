"""What is billed above a limit is ended, however late it is found, and never forgotten."""

from __future__ import annotations

import json
import re
import time

import pytest
from typer.testing import CliRunner

pytest.importorskip("starlette")
pytest.importorskip("boto3")

from launcher.api.prepare import Limits
from launcher.cli.main import app
from launcher.cli.runpod import leaks
from launcher.cli.runs import clean
from launcher.rundir.find import find_run
from launcher.rundir.layout import RunDir
from launcher.rundir.time import seconds_of
from launcher.schedulers.base import SchedulerError, UnclearError
from launcher.schedulers.runpod.errors import UnendedError
from launcher.schedulers.runpod.lifecycle import is_past, past_deadline
from launcher.schedulers.runpod.offers import spent_of
from launcher.schedulers.runpod.poller import evidence_of
from launcher.schedulers.runpod.renting import NotRentedError
from launcher.spec.events import DuplicateEnded, Finished, Found, Rejected, Submitting
from tests.lab import wait_for
from tests.schedulers.runpod.runs import A5000, A6000, Lab


@pytest.mark.slow
def test_a_pod_above_the_limit_that_cannot_be_ended_is_kept_in_view_until_it_is(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    ready = lab.prepare(limits=Limits(max_price=0.1))
    lab.sandbox.faults(price=1, server_error={"p": 1, "on": "DELETE /v2/pods.*"})
    words = r"billed at 0\.\d+ USD/h, the limit is 0\.100; pods/\w+ could not be ended"
    with pytest.raises(SchedulerError, match=words) as caught:
        lab.submit(ready)
    assert not isinstance(caught.value, NotRentedError)
    run = find_run(ready.request.run_id)
    (pod,) = lab.pods(run)
    (event,) = [event for event in run.read_events() if isinstance(event, Rejected)]
    assert event.handle == f"runpod:box:{pod['id']}" == lab.handle(run)
    assert event.usd_per_hour > 0.1
    wait_for(lambda: b'"cancelled"' in (lab.there(run) / "state.json").read_bytes(), "its pod stops")
    assert "keeps costing money" in lab.look(run).reason
    for end in (False, True):
        with pytest.raises(SystemExit) as ended:
            leaks(None, end=end, json=True)
        (told,) = json.loads(capsys.readouterr().out)
        assert ended.value.code == 1 and "the limit is 0.100" in told["why"] and not told["ended"]
    lab.sandbox.faults()
    status = lab.until(run, "failed")
    assert not lab.pods(run)
    assert status.reason.endswith("the limit is 0.100: its pod was ended")


def test_a_rejected_pod_counts_towards_the_budget_until_it_is_ended(lab: Lab) -> None:
    ready = lab.prepare(limits=Limits(budget=0.05))
    lab.sandbox.faults(price=1, server_error={"p": 1, "on": "DELETE /v2/pods.*"})
    with pytest.raises(UnendedError):
        lab.submit(ready)
    run = find_run(ready.request.run_id)
    (rejected,) = [event for event in run.read_events() if isinstance(event, Rejected)]
    assert rejected.limit == pytest.approx(0.061, abs=0.001) and rejected.usd_per_hour > 0.1

    def finished() -> bool:
        lab.look(run)
        return any(isinstance(event, Finished) for event in run.read_events())

    wait_for(finished, "its own word that it has ended")
    first = spent_of(run.read_events(), time.time())
    time.sleep(0.5)
    later = spent_of(run.read_events(), time.time())
    assert later - first == pytest.approx(0.5 / 3600 * rejected.usd_per_hour, rel=0.5)
    lab.sandbox.faults()
    lab.until(run, "failed")
    ended = spent_of(run.read_events(), time.time())
    assert ended > later
    time.sleep(0.2)
    assert spent_of(run.read_events(), time.time()) == ended


@pytest.mark.parametrize("limits", [Limits(max_price=0.1), Limits(budget=0.05)], ids=["price", "budget"])
def test_a_pod_that_is_found_late_is_held_against_the_limit(
    lab: Lab, limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAUNCHER_RUNPOD_PAUSE", "0.01")  # submit looks for it for 0.6 s, twice
    ready = lab.prepare(limits=limits)
    lab.sandbox.faults(
        price=1, lost_response={"p": 1, "on": "POST /(v2/pods|graphql)"}, unlisted={"p": 1, "value": 3}
    )
    with pytest.raises(UnclearError):
        lab.submit(ready)
    lab.sandbox.faults()
    run = find_run(ready.request.run_id)
    status = lab.until(run, "failed")
    assert re.search(r"billed at 0\.18\d? USD/h, the limit is 0\.\d+: its pod was ended", status.reason), (
        status
    )
    lab.no_pods(run)
    events = run.read_events()
    assert any(isinstance(event, Found) and event.usd_per_hour > 0.1 for event in events)
    assert spent_of(events, time.time()) > 0


def test_a_pod_that_is_found_late_and_costs_what_was_shown_goes_on(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAUNCHER_RUNPOD_PAUSE", "0.01")
    ready = lab.prepare(limits=Limits(max_price=0.1))
    lab.sandbox.faults(lost_response={"p": 1, "on": "POST /(v2/pods|graphql)"}, unlisted={"p": 1, "value": 3})
    with pytest.raises(UnclearError):
        lab.submit(ready)
    lab.sandbox.faults()
    run = find_run(ready.request.run_id)
    lab.until(run, "running")
    wait_for(lambda: len(lab.pods(run)) == 1 and lab.look(run).state == "running", "one pod")
    assert [e.usd_per_hour for e in run.read_events() if isinstance(e, Found)] == [0.06]
    lab.go(run)
    lab.until(run, "succeeded")


def unconfirmed(lab: Lab, *, unlisted: float, slow_pull: float) -> RunDir:
    """A run whose pods RunPod lists after `unlisted` seconds, and whose image takes `slow_pull` seconds."""
    ready = lab.prepare()
    lab.sandbox.faults(
        lost_response={"p": 1, "on": "POST /(v2/pods|graphql)"},
        unlisted={"p": 1, "value": unlisted},
        slow_pull={"p": 1, "value": slow_pull},
    )
    with pytest.raises(UnclearError):
        lab.submit(ready)
    lab.sandbox.faults()
    return find_run(ready.request.run_id)


@pytest.mark.slow
def test_a_pod_of_a_cancelled_run_that_appears_later_and_never_starts_is_ended_by_a_look(lab: Lab) -> None:
    run = unconfirmed(lab, unlisted=5, slow_pull=3000)
    lab.scheduler.cancel(run)
    assert run.read_state().state == "cancelled" and lab.bill(run) == 2
    wait_for(lambda: len(lab.pods(run)) == 2, "the pods are listed")
    (status,) = lab.scheduler.statuses([run])
    assert status.state == "cancelled"
    assert re.fullmatch(r"cancelled before it began, but pod \w+ appeared later", status.reason)
    assert not lab.pods(run), "they cost money, and their image may never come"
    (duplicate,) = [event for event in run.read_events() if isinstance(event, DuplicateEnded)]
    assert duplicate.usd > 0 and not any(isinstance(event, Found) for event in run.read_events())
    assert 0 < spent_of(run.read_events(), time.time()) == spent_of(run.read_events(), time.time() + 60)


def test_a_cluster_of_a_cancelled_run_that_appears_and_never_starts_is_ended_after_its_time_too(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RunPod has no time limit for a cluster of pods."""
    monkeypatch.setenv("LAUNCHER_RUNPOD_PAUSE", "0.01")
    ready = lab.prepare(gpu=True, job={"resources": {"nodes": 2}}, max_hours=1 / 3600)
    slow = {"p": 1, "value": 3000}
    lab.sandbox.faults(
        lost_response={"p": 1, "on": "POST /v2/clusters"}, unlisted={"p": 1, "value": 3}, slow_pull=slow
    )
    with pytest.raises(UnclearError):
        lab.submit(ready)
    lab.sandbox.faults()
    run = find_run(ready.request.run_id)
    lab.scheduler.cancel(run)

    def clusters() -> list[dict[str, object]]:
        found = lab.sandbox.ask("GET", "/clusters").json()["clusters"]
        return [one for one in found if run.id in one["name"]]

    wait_for(lambda: is_past(evidence_of(run), 0.0), "their time is over")
    wait_for(clusters, "the first is listed")
    wait_for(lambda: lab.look(run) and not lab.sandbox.state()["live"], "looks end both")
    assert lab.look(run).state == "cancelled" and lab.bill(run) == 4, "two pods each"
    assert [event.kind for event in run.read_events()].count("rejected") == 1


def test_a_cancelled_run_whose_pod_appears_later_runs_nothing(lab: Lab) -> None:
    run = unconfirmed(lab, unlisted=30, slow_pull=6)
    unknown = f"runpod:box:run/{run.id}"
    assert lab.look(run).handle == unknown, "nobody knows of a pod yet"
    said = CliRunner().invoke(app, ("cancel", run.id)).output
    words = (
        r"RunPod has confirmed no pod for it\. "
        r"A pod that still appears \(until \d\d:\d\d:\d\d UTC\) stops by itself"
    )
    assert re.search(words, said), said
    assert lab.look(run).state == "cancelled"
    with pytest.raises(
        SchedulerError, match=rf"is kept until .* UTC: .* `launcher clean {run.id}` after that"
    ):
        clean([run.id], yes=True)
    wait_for(lambda: not lab.sandbox.state()["live"], "the pods end themselves")
    assert lab.bill(run) == 2
    assert json.loads((lab.there(run) / "state.json").read_text())["state"] == "cancelled"
    lab.scheduler.resume(run)
    lab.until(run, "running")
    lab.go(run)
    lab.until(run, "succeeded")


def test_a_pod_whose_start_script_begins_too_late_ends_itself_at_once(lab: Lab) -> None:
    lab.sandbox.faults(slow_pull={"p": 1, "value": 3})
    run = lab.submit(lab.prepare(max_hours=2 / 3600, server_limit=False))
    wait_for(lambda: not lab.pods(run), "it ends itself")
    assert not (lab.there(run) / "pod-node-0.log").exists(), "nothing was run"
    status = lab.until(run, "failed")
    assert status.failure == "time-limit" and "over when its start script began" in status.reason


def test_a_submission_leads_with_the_price_of_the_first_offer_and_the_worst_of_all(lab: Lab) -> None:
    first = ("submit", "job.yaml", "-c", "box.yaml", "--dry-run")
    lab.prepare(gpu=True, other_gpus={A6000: "47.4GiB"}, max_hours=2)
    done = CliRunner().invoke(app, (*first, "--json"))
    cost = json.loads(done.stdout)["cost"]
    assert cost["usd_per_hour"] == pytest.approx(0.2714, abs=1e-3) and cost["price"].startswith(
        "1 x " + A5000
    )
    assert cost["worst_usd"] == pytest.approx(2 * 0.4914, abs=1e-3), (
        "the other GPU, should the first be refused"
    )
    shown = CliRunner().invoke(app, first).stdout.splitlines()
    assert [line.split()[0] for line in shown[:5]] == ["price", "predicted", "predicted", "worst", "job"]


def test_a_run_says_itself_that_its_time_is_over_before_runpod_ends_its_pod(lab: Lab) -> None:
    run = lab.submit(lab.prepare(max_hours=1))
    (pod,) = lab.pods(run)
    (asked,) = [event for event in run.read_events() if isinstance(event, Submitting)]
    left = float(pod["env"]["LAUNCHER_DEADLINE"]) - (seconds_of(asked.time) or 0)
    assert 3600 - 180 - 2 < left <= 3600 - 180 + 10
    lab.go(run)
    lab.until(run, "succeeded")


@pytest.mark.parametrize("behind", [2 * 3600, -2 * 3600], ids=["behind", "ahead"])
def test_the_time_of_a_pod_counts_by_runpods_clock_whatever_this_machines_says(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, behind: int
) -> None:
    began, clock = time.time(), time.time
    monkeypatch.setattr(time, "time", lambda: clock() - behind)
    run = lab.submit(lab.prepare(max_hours=1))
    lab.until(run, "running")
    (pod,) = lab.pods(run)
    latest = began + 3600 - 180
    assert latest - 2 < float(pod["env"]["LAUNCHER_DEADLINE"]) < latest + 60
    lab.go(run)
    lab.until(run, "succeeded")


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [True, False], ids=["gpu", "cpu"])
def test_a_pod_that_never_begins_is_ended_by_runpod_itself_and_so_is_the_next(lab: Lab, gpu: bool) -> None:
    """Nobody looks at the run: `lab.no_pods` asks the sandbox alone."""
    lab.sandbox.faults(slow_pull={"p": 1, "value": 600})
    run = lab.submit(lab.prepare(gpu=gpu, max_hours=2 / 3600))
    lab.no_pods(run)
    status = lab.until(run, "failed")
    assert status.failure == "time-limit" and "was over before its start script began" in status.reason
    assert status.resumable
    lab.scheduler.resume(run)
    assert len(lab.pods(run)) == 1
    lab.no_pods(run)
    assert lab.until(run, "failed").failure == "time-limit" and lab.bill(run) == 2


def test_a_pod_that_never_begins_is_a_leak_once_its_time_is_over_and_a_look_ends_it(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LAUNCHER_RUNPOD_PAUSE", "0.005")  # 1.5 s of grace
    lab.sandbox.faults(slow_pull={"p": 1, "value": 600})
    first = lab.submit(lab.prepare(max_hours=1 / 3600, limits=Limits(budget=0.01), server_limit=False))
    second = lab.submit(lab.prepare(max_hours=1 / 3600, server_limit=False))
    words = "it exists more than 1s after its creation (max_hours, or the budget)"
    wait_for(
        lambda: {past_deadline(evidence_of(run)) for run in (first, second)} == {words},
        "their time is over",
        10,
    )

    def listed(end: bool) -> list[bool]:
        with pytest.raises(SystemExit) as ended:
            leaks(None, end=end, json=True)
        told = json.loads(capsys.readouterr().out)
        assert {one["why"] for one in told} == {words} and ended.value.code == (0 if end else 1)
        return [one["ended"] for one in told]

    assert listed(end=False) == [False, False], "to list them ends none"
    status = lab.look(first)
    assert (status.state, status.reason) == ("failed", f"{words}: its pod was ended")
    assert not lab.pods(first)
    assert listed(end=True) == [True] and not lab.pods(second)
    assert lab.until(second, "failed").resumable

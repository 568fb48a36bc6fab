"""Two that would rent for one run, and two pods that have come to be for it all the same."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("boto3")

from launcher.cli.runpod import leaks
from launcher.rundir.files import replace_json
from launcher.rundir.layout import RunDir
from launcher.rundir.time import now
from launcher.schedulers.base import SchedulerError
from launcher.schedulers.runpod.handle import pod_name
from launcher.schedulers.runpod.renting import renting
from launcher.schedulers.runpod.request import scripts_request
from tests.lab import wait_for
from tests.schedulers.runpod.runs import SUPERVISOR, Lab

LOCKED = SUPERVISOR.replace(
    "state running", 'exec 9>>"$run/supervisor.lock"; flock -n 9 || exit 88\nstate running'
)


def resumed_besides(lab: Lab, run: RunDir, **faults: Any) -> str:
    """The id of a second pod: what two resumes at the same time would leave."""
    lab.sandbox.faults(**faults)
    request = scripts_request(run.scripts)
    env = {**request["env"], "LAUNCHER_SUBMISSION": "2", "LAUNCHER_MAX_SECONDS": "600"}
    made = lab.sandbox.ask("POST", "/pods", json={**request, "env": env, "name": pod_name(run.id, 2)}).json()
    run.event("submitting", submission=2, limits={})
    run.event("resubmitted", handle=f"runpod:box:{made['id']}", usd_per_hour=0.06, seconds=600)
    return str(made["id"])


def lines_of(lab: Lab, run: RunDir) -> list[str]:
    return (lab.there(run) / "events.jsonl").read_text().splitlines()


def ended_by_leaks(capsys: pytest.CaptureFixture[str]) -> set[str]:
    capsys.readouterr()
    with pytest.raises(SystemExit):
        leaks(None, end=True, json=True)
    return {one["path"] for one in json.loads(capsys.readouterr().out) if one["ended"]}


@pytest.mark.slow
def test_of_two_resumes_at_the_same_time_one_rents(lab: Lab) -> None:
    run = lab.submit(lab.prepare())
    handle = lab.handle(run)
    lab.until(run, "running")
    lab.sandbox.ask("DELETE", handle.replace("runpod:box:", "/pods/"))
    lab.until(run, "lost", "failed", "interrupted")
    lab.sandbox.faults(slow_answer={"p": 1, "value": 3, "on": "POST /(v2/pods|graphql)$"})
    command = (sys.executable, "-m", "launcher", "resume", run.id)
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for _ in range(2)]
    said = [process.communicate(timeout=240)[0].decode() for process in both]
    codes = sorted(process.returncode for process in both)
    assert codes[0] == 0 < codes[1], said
    refused = next(text for text, process in zip(said, both, strict=True) if process.returncode)
    assert re.search(r"another process( of launcher is renting)?|is still submitted", refused)
    lab.until(run, "running")
    assert lab.bill(run) == 2


def test_while_a_follower_rents_another_pod_none_is_rented_on_demand(lab: Lab) -> None:
    run = lab.submit(lab.prepare(gpu=True, bid_per_gpu=0.2))
    handle = lab.handle(run)
    lab.until(run, "running")
    with renting(run):  # as `logs -f` has it
        lab.sandbox.interrupt(handle.rpartition(":")[2])
        assert lab.until(run, "interrupted").handle == handle
        with pytest.raises(SchedulerError, match=f"renting a pod for {run.id}: `launcher status"):
            lab.scheduler.resume(run)
    wait_for(lambda: lab.look(run).handle != handle, "another pod")
    assert lab.bill(run) == 2


@pytest.mark.slow
@pytest.mark.parametrize("told", [True, False], ids=["it tells who has the run", "it is gone without a word"])
def test_the_pod_that_trains_is_followed_and_never_ended_as_leaked(
    lab: Lab, capsys: pytest.CaptureFixture[str], told: bool
) -> None:
    (lab.sandbox.volume / "python").write_text(LOCKED)
    run = lab.submit(lab.prepare())
    handle = lab.handle(run)
    lab.until(run, "running")
    first = handle.rpartition(":")[2]
    second = resumed_besides(lab, run, **({} if told else {"slow_pull": {"p": 1, "value": 60, "times": 1}}))
    if told:
        wait_for(lambda: (lab.there(run) / f"pod-{second}.done").exists(), "the second gives up")
        assert [pod["id"] for pod in lab.pods(run)][:1] == [first]
        assert not (lab.there(run) / "runpod-submission-2").exists()
        (event,) = [one for one in map(json.loads, lines_of(lab, run)) if one["event"] == "twin"]
        assert (event["pod"], event["handle"]) == (second, handle)
    else:
        lab.sandbox.ask("DELETE", f"/pods/{second}")
    assert f"/pods/{first}" not in ended_by_leaks(capsys)
    wait_for(lambda: lab.look(run).handle == handle, "the first is followed")
    assert (lab.look(run).state, len(lab.pods(run))) == ("running", 1)
    replace_json(
        run.state, {"state": "lost", "failure": "node-failed", "time": "2026-01-01T00:00:00.000000Z"}
    )
    run.event("resubmitted", handle=f"runpod:box:{second}", time=now())  # as it was written down before
    there = lab.there(run) / "state.json"
    said = there.read_text()
    for text in ('{"state": []}', "[]", said):  # no state of a run; the real one
        there.write_text(text)
        assert ended_by_leaks(capsys) == set()
    with pytest.raises(SchedulerError, match=f"is still running in pods/{first}: nothing is rented"):
        lab.scheduler.resume(run)
    lab.scheduler.cancel(run)
    assert lab.until(run, "cancelled").exit_code == 18
    lab.no_pods(run)
    assert lab.bill(run) == 2

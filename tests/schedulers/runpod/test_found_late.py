"""Pods that appear after a submission has given up waiting for RunPod's word on them."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("boto3")

from launcher.rundir.find import find_run
from launcher.rundir.layout import RunDir
from launcher.schedulers.base import UnclearError
from launcher.schedulers.runpod.request import scripts_request
from tests.lab import wait_for
from tests.schedulers.runpod.runs import A5000, A6000, Lab


def made(lab: Lab, run: RunDir, **fields: Any) -> str:
    """The id of a pod that this run's own request makes."""
    done = lab.sandbox.ask("POST", "/pods", json={**scripts_request(run.scripts), **fields})
    assert done.status_code == 201, done.text
    return str(done.json()["id"])


@pytest.mark.slow
@pytest.mark.parametrize("begun", [True, False], ids=["the second has begun", "none has begun"])
def test_of_two_that_a_look_finds_who_has_begun_the_run_is_kept_else_the_first(lab: Lab, begun: bool) -> None:
    ready = lab.prepare()
    lab.sandbox.faults(server_error={"p": 1, "on": "/(v2/pods|graphql)$"})
    with pytest.raises(UnclearError):
        lab.submit(ready)
    run = find_run(ready.request.run_id)
    lab.sandbox.faults(slow_pull={"p": 1, "value": 1.5, "times": 1 if begun else 2})
    first, second = made(lab, run), made(lab, run)
    claim = lab.there(run) / "runpod-submission-1"
    if begun:
        wait_for(lambda: claim.exists() and claim.read_text().strip() == second, "the second begins")
    kept = second if begun else first
    assert [pod["id"] for pod in lab.pods(run)] == [first, second]
    assert lab.look(run).handle == f"runpod:box:{kept}"
    assert [pod["id"] for pod in lab.pods(run)] == [kept]
    lab.until(run, "running")
    assert claim.read_text().strip() == kept
    lab.go(run)
    lab.until(run, "succeeded")
    lab.no_pods(run)


@pytest.mark.parametrize("gpu", [A5000, pytest.param(A6000, marks=pytest.mark.slow)])
def test_a_pod_runs_with_the_plan_of_its_own_gpu_or_is_ended(lab: Lab, gpu: str) -> None:
    ready = lab.prepare(gpu=True, other_gpus={A6000: "47.4GiB"})
    lab.sandbox.faults(server_error={"p": 1, "times": 1, "on": "POST /(v2/pods|graphql)$"}, no_capacity=1)
    words = rf"{A6000}, .*: not requested while a pod with {A5000} may still appear"
    with pytest.raises(UnclearError, match=words):
        lab.submit(ready)
    lab.sandbox.faults()
    run = find_run(ready.request.run_id)
    there = json.loads((lab.there(run) / "run.json").read_text())
    assert there["cluster"]["runpod"]["gpu_id"] == A5000
    made(lab, run, gpu={"id": gpu, "count": 1})
    if gpu == A5000:
        lab.until(run, "running")
        lab.go(run)
        lab.until(run, "succeeded")
    else:
        status = lab.until(run, "failed")
        words = f"its pod has {A6000}, and the run is planned for {A5000}: its pod was ended"
        assert status.reason == words
    lab.no_pods(run)

"""Values that nobody may read: not where RunPod quotes a request, not where a job prints its environment."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytest.importorskip("starlette")
pytest.importorskip("boto3")

from launcher.schedulers import registry
from launcher.schedulers.base import SchedulerError
from launcher.spec.events import Refused
from tests.sandbox.server import ROOT
from tests.schedulers.runpod.http_server import Asked, Reply, Served
from tests.schedulers.runpod.runs import Lab

CANARY = "hf_canary\nof 'two' lines_9137"


class Quoting:
    """RunPod as the sandbox plays it, but a request for a pod is refused, and its environment quoted."""

    def __init__(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refuses = True
        self.served = Served(self.answer)
        self.behind = lab.sandbox.environ["LAUNCHER_RUNPOD_API"].removesuffix("/v2")
        monkeypatch.setenv("LAUNCHER_RUNPOD_API", f"{self.served.url}/v2")
        monkeypatch.setenv("LAUNCHER_RUNPOD_GRAPHQL", f"{self.served.url}/graphql")
        registry.opened.clear()

    def answer(self, asked: Asked) -> Reply:
        if self.refuses and asked.method == "POST":
            if asked.path == "/graphql":
                env = json.dumps(asked.body["variables"]["input"]["env"])
                return Reply(200, {"errors": [{"message": f'Variable "$input" got invalid value {env}'}]})
            said: dict[str, Any] = {"path": "/env", "message": f"{asked.body['env']!r} does not match"}
            return Reply(422, {"status": 422, "detail": "no valid request", "errors": [said]})
        headers = {"Authorization": asked.headers["Authorization"]}
        url = f"{self.behind}{asked.path}" + (f"?{asked.query}" if asked.query else "")
        found = httpx.request(asked.method, url, headers=headers, json=asked.body, timeout=240)
        return Reply(found.status_code, raw=found.content, headers={"Content-Type": "application/json"})


@pytest.fixture
def quoting(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[Quoting]:
    monkeypatch.setenv("CANARY", CANARY)
    found = Quoting(lab, monkeypatch)
    yield found
    found.served.close()


def quoted(error: BaseException) -> None:
    assert "CANARY" in str(error) and "***" in str(error), "it is quoted, without the value"
    assert "canary" not in str(error) and "lines_9137" not in str(error)


def test_a_request_that_runpod_quotes_is_told_without_its_secrets(lab: Lab, quoting: Quoting) -> None:
    with pytest.raises(SchedulerError) as caught:
        lab.submit(lab.prepare(job={"secrets": ["CANARY"]}))
    quoted(caught.value)
    with pytest.raises(SchedulerError) as caught:
        lab.submit(lab.prepare(gpu=True, job={"secrets": ["CANARY"]}, bid_per_gpu=0.2))
    quoted(caught.value)
    quoting.refuses = False
    run = lab.submit(lab.prepare(job={"secrets": ["CANARY"]}))
    lab.until(run, "running")
    lab.scheduler.cancel(run)
    lab.until(run, "cancelled")
    lab.no_pods(run)
    quoting.refuses = True
    with pytest.raises(SchedulerError) as caught:
        lab.scheduler.resume(run)
    quoted(caught.value)
    assert any(isinstance(event, Refused) and "***" in event.reason for event in run.read_events())
    for file in run.path.rglob("*"):
        if file.is_file():
            assert b"canary" not in file.read_bytes() and b"lines_9137" not in file.read_bytes(), file


@pytest.mark.slow
@pytest.mark.parametrize("secrets", [[], ["RUNPOD_API_KEY"]], ids=["its own key", "a key of the job's"])
def test_a_job_that_prints_its_environment_does_not_tell_the_key(lab: Lab, secrets: list[str]) -> None:
    real = f'#!/bin/bash\nPYTHONPATH={ROOT} exec {sys.executable} "$@"\n'
    (lab.sandbox.volume / "python").write_text(real)
    printing = ["python", "-c", "import os; print(dict(os.environ)); raise SystemExit(3)"]
    run = lab.submit(lab.prepare(job={"command": printing, "secrets": secrets}))
    lab.until(run, "failed")
    lab.no_pods(run)  # it still had the key to end itself with
    to = lab.folder / "whole"
    lab.scheduler.copy(run).download(to)
    printed = [file.read_text() for file in to.rglob("rank-000.out")]
    assert printed and all("'RUNPOD_POD_ID'" in text for text in printed)
    assert all(("'RUNPOD_API_KEY': '***'" in text) == bool(secrets) for text in printed)
    for file in to.rglob("*"):
        if file.is_file():
            assert b"rpa_" not in file.read_bytes(), file


def test_a_secret_from_a_file_or_another_variable_reaches_the_ranks(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pod has neither the file nor the variable, only the values."""
    (lab.sandbox.volume / "python").write_text(f'#!/bin/bash\nPYTHONPATH={ROOT} exec {sys.executable} "$@"\n')
    monkeypatch.setenv("ELSEWHERE", "hf_one")
    token = lab.folder / "token"
    token.write_text("hf_two")
    script = "[[ $A == hf_one && $B == hf_two && -z $ELSEWHERE ]] && exit 3"
    secrets = [{"name": "A", "env": "ELSEWHERE"}, {"name": "B", "file": str(token)}]
    job = {"command": ["bash", "-c", script], "secrets": secrets, "retries": {"same": 0}}
    run = lab.submit(lab.prepare(job=job))
    token.unlink()
    lab.until(run, "failed")
    assert "exit code 3" in lab.look(run).reason

"""Each of RunPod's errors has one documented consequence, and so has what is no answer of its API."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.schedulers.base import SchedulerError
from launcher.schedulers.runpod import api, settings
from launcher.schedulers.runpod.api import Client
from launcher.schedulers.runpod.errors import ApiError, Fate, HostileAnswerError, LostAnswerError
from launcher.schedulers.runpod.pods import Pod, Pods, read
from launcher.schedulers.runpod.settings import pause_seconds
from tests.schedulers.runpod.http_server import Asked, Reply, Served

KEY = "rpa_CANARY0123456789"


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[Client, Served]]]:
    monkeypatch.setenv("RUNPOD_API_KEY", KEY)
    monkeypatch.setenv("LAUNCHER_RUNPOD_PAUSE", "0.01")
    running: list[Served] = []

    def start(*replies: Reply) -> tuple[Client, Served]:
        """Answers in this order, the last one for ever."""
        left = list(replies)

        def answer(_: Asked) -> Reply:
            return left.pop(0) if len(left) > 1 else left[0]

        server = Served(answer)
        running.append(server)
        monkeypatch.setenv("LAUNCHER_RUNPOD_API", f"{server.url}/v2")
        monkeypatch.setenv("LAUNCHER_RUNPOD_GRAPHQL", f"{server.url}/graphql")
        return Client(), server

    yield start
    for server in running:
        server.close()


def problem(status: int, detail: str = "why", **headers: str) -> Reply:
    body = {"title": "T", "status": status, "detail": detail, "errors": ["$.gpu: is missing"]}
    return Reply(status, body, {"Content-Type": "application/problem+json", **headers})


@pytest.mark.parametrize(
    ("status", "fate", "word"),
    [
        (400, Fate.SKIP, "nothing is in stock"),
        (401, Fate.STOP, "API key"),
        (402, Fate.STOP, "add credit"),
        (403, Fate.SKIP, "may not"),
        (404, Fate.STOP, "it does not exist"),
        (409, Fate.STOP, "does not allow"),
        (422, Fate.STOP, "correct the profile"),
        (500, Fate.RETRY, "internal error"),
        (503, Fate.RETRY, "internal error"),
    ],
)
def test_each_documented_error_has_its_fate_and_a_creation_is_asked_once(serve, status, fate, word) -> None:
    client, server = serve(problem(status))
    with pytest.raises(ApiError) as caught:
        client.post("/pods", {"name": "x"})
    assert (caught.value.status, caught.value.fate) == (status, fate)
    assert "why; $.gpu: is missing" in str(caught.value) and word in str(caught.value)
    assert len(server.asked) == 1
    assert isinstance(caught.value, LostAnswerError) == (status >= 500), "a 5xx may have made a pod"


def test_too_many_requests_wait_as_long_as_they_are_told(serve) -> None:
    client, server = serve(problem(429, **{"Retry-After": "1"}), Reply(201, {"id": "a"}))
    began = time.monotonic()
    assert client.post("/pods", {}) == {"id": "a"}
    assert time.monotonic() - began >= 1 and len(server.asked) == 2


@pytest.mark.parametrize("status", [429, 503])
def test_a_longer_wait_than_anybody_has_is_an_error_that_says_so(serve, monkeypatch, status: int) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    client, server = serve(problem(status, **{"Retry-After": "3600"}))
    for ask in (lambda: client.get("/pods"), lambda: client.post("/pods", {})):
        with pytest.raises(ApiError, match=r"RunPod asks for a pause of 3600 s") as caught:
            ask()
        assert caught.value.fate is Fate.STOP
    assert len(server.asked) == 2 and not slept


def test_a_read_is_tried_again_and_a_creation_without_an_answer_is_not(serve) -> None:
    client, server = serve(problem(503), Reply(drop=True), Reply(200, {"pods": []}))
    assert client.get("/pods") == {"pods": []}
    assert len(server.asked) == 3
    client, server = serve(Reply(drop=True))
    with pytest.raises(LostAnswerError):
        client.post("/pods", {})
    assert len(server.asked) == 1


def test_a_pod_that_is_gone_is_deleted_without_complaint(serve) -> None:
    client, server = serve(problem(404))
    client.delete("/pods/a")
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (Reply(raw=b"x" * (api.LARGEST + 1)), "larger than 16 MiB"),
        (Reply(302, None, {"Location": "http://127.0.0.1:9/elsewhere"}), "the answer is a redirect"),
        (Reply(raw=b"<html>\x1b[2J"), "is not JSON: <html> [2J"),
        (Reply(raw=b"[" * 100_000), "is not JSON"),
    ],
)
def test_an_answer_that_is_none_is_one_clear_error(serve, reply: Reply, words: str) -> None:
    client, server = serve(reply)
    with pytest.raises(HostileAnswerError) as caught:
        client.get("/pods")
    assert words in str(caught.value) and "\x1b" not in str(caught.value)
    assert len(server.asked) == 1, "nothing is followed"


GOOD = {"id": "p1", "name": "n", "status": "RUNNING", "cost": 0.5, "env": {"TOKEN": "CANARY"}}


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"cost": "free"}, "pods.0.cost"),
        ({"cost": -1}, "pods.0.cost"),
        ({"cost": None}, "pods.0.cost"),
        ({"id": "../clusters/x"}, "pods.0.id"),
        ({"id": 7}, "pods.0.id"),
        ({"status": "DANCING"}, "pods.0.status"),
        ({"gpu": []}, "pods.0.gpu"),
    ],
)
def test_a_wrong_type_names_the_field_and_shows_no_value(change: dict[str, Any], where: str) -> None:
    with pytest.raises(HostileAnswerError) as caught:
        read(Pods, {"pods": [{**GOOD, **change}]}, "GET /pods")
    assert f"GET /pods: the answer does not match RunPod's API: {where}" in str(caught.value)
    assert "CANARY" not in str(caught.value)
    assert read(Pod, GOOD, "").living


def test_no_error_shows_the_key_even_where_the_server_repeats_it(serve) -> None:
    client, _ = serve(problem(400, f"bad header Bearer {KEY}"))
    with pytest.raises(ApiError) as caught:
        client.get("/pods")
    assert KEY not in str(caught.value) and "***" in str(caught.value)
    assert KEY not in repr(client) and KEY not in repr(caught.value.__cause__)


def test_graphql_sends_variables_and_its_errors_come_with_200(serve) -> None:
    nasty = 'quote " and } brace'
    client, server = serve(Reply(200, {"data": {"podRentInterruptable": {"id": "p"}}}))
    assert client.graphql("mutation($input: X!) { a }", {"input": {"name": nasty}}) == {
        "podRentInterruptable": {"id": "p"}
    }
    assert server.asked[0].body["variables"]["input"]["name"] == nasty
    for message, fate in (
        ("There are no longer any instances available", Fate.SKIP),
        ("low balance", Fate.STOP),
    ):
        client, _ = serve(Reply(200, {"errors": [{"message": message}], "data": None}))
        with pytest.raises(ApiError, match=message) as caught:
            client.graphql("mutation { a }", {})
        assert caught.value.fate is fate


def test_nobody_there_is_said_so_after_a_few_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("RUNPOD_API_KEY", KEY)
    monkeypatch.setenv("LAUNCHER_RUNPOD_PAUSE", "0.001")
    monkeypatch.setenv("LAUNCHER_RUNPOD_API", f"http://127.0.0.1:{port}/v2")
    with pytest.raises(ApiError, match="cannot reach RunPod"):
        Client().post("/pods", {})


def test_keys_are_not_sent_in_the_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNPOD_API_KEY", KEY)
    for address in (
        "http://api.runpod.io/v2",
        "ftp://127.0.0.1/",
        "nonsense",
        "http://127.0.0.1.evil.example/",
    ):
        monkeypatch.setenv("LAUNCHER_RUNPOD_API", address)
        with pytest.raises(ApiError, match=r"LAUNCHER_RUNPOD_API: .* only over https"):
            Client()


def test_keys_come_from_the_environment_or_a_file_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RUNPOD_API_KEY", "RUNPOD_S3_ACCESS_KEY", "RUNPOD_S3_SECRET_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(SchedulerError, match="no RunPod API key"):
        settings.api_key()
    file = settings.folder() / "runpod-key"
    file.parent.mkdir()
    file.write_text(f"{KEY}\n")
    file.chmod(0o640)
    with pytest.raises(SchedulerError, match=r"can be read by others \(mode 640\)") as caught:
        settings.api_key()
    assert KEY not in str(caught.value)
    file.chmod(0o600)
    assert settings.api_key() == KEY
    (settings.folder() / "runpod-s3-key").write_text("user_a:rps_b")
    (settings.folder() / "runpod-s3-key").chmod(0o400)
    assert settings.s3_keys() == ("user_a", "rps_b")
    monkeypatch.setenv("RUNPOD_API_KEY", "two\nlines")
    with pytest.raises(SchedulerError, match="line break") as caught:
        settings.api_key()
    assert "two" not in str(caught.value)


@pytest.mark.parametrize("pause", ["abc", "", "nan", "inf", "-1"])
def test_a_pause_that_is_no_number_of_seconds_is_refused(monkeypatch: pytest.MonkeyPatch, pause: str) -> None:
    monkeypatch.setenv("LAUNCHER_RUNPOD_PAUSE", pause)
    with pytest.raises(
        ApiError, match=f"^LAUNCHER_RUNPOD_PAUSE: '{pause}' is not a number of seconds, e.g. 0.5$"
    ):
        pause_seconds()


def test_a_wrong_pause_is_one_message_of_the_command(tmp_path: Path) -> None:
    environ = {
        **os.environ,
        "LAUNCHER_RUNPOD_PAUSE": "abc",
        "RUNPOD_API_KEY": "k",
        "XDG_STATE_HOME": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-m", "launcher", "runpod", "leaks"], env=environ, capture_output=True, text=True
    )
    assert done.returncode == 4 and not done.stdout
    assert done.stderr == "launcher: LAUNCHER_RUNPOD_PAUSE: 'abc' is not a number of seconds, e.g. 0.5\n"

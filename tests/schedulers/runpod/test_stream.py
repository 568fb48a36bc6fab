"""A pod's log from a server that is silent, or that sends an event without an end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("httpx_sse")

from launcher.schedulers.runpod import api
from launcher.schedulers.runpod.api import Client
from launcher.schedulers.runpod.errors import ApiError, HostileAnswerError
from launcher.schedulers.runpod.stream import LONGEST, follow
from tests.schedulers.runpod.http_server import Asked, Reply, Served

STREAM = {"Content-Type": "text/event-stream"}
OPEN = {**STREAM, "Content-Length": str(10**9)}


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[Client, Served]]]:
    monkeypatch.setenv("RUNPOD_API_KEY", "rpa_0")
    monkeypatch.setenv("LAUNCHER_RUNPOD_PAUSE", "0.01")
    monkeypatch.setattr(api, "SILENCE", 0.1)
    running: list[Served] = []

    def start(answer: Callable[[Asked], Reply]) -> tuple[Client, Served]:
        running.append(Served(answer))
        monkeypatch.setenv("LAUNCHER_RUNPOD_API", running[-1].url)
        return Client(), running[-1]

    yield start
    for server in running:
        server.close()


def event(number: int, end: str = "\n") -> str:
    data = json.dumps({"ts": "2026-01-01T00:00:00Z", "source": "container", "line": f"line {number}"})
    return f"id: {number}{end}data: {data}{end}{end}"


def test_silence_is_no_failure_and_the_log_goes_on_behind_its_last_line(serve) -> None:
    def answer(asked: Asked) -> Reply:
        last = asked.headers.get("Last-Event-ID")
        if last is None:
            return Reply(raw=event(1).encode(), headers=OPEN, hold=0.4)
        if len(server.asked) < 10:
            return Reply(raw=b"", headers=OPEN, hold=0.4)
        return Reply(raw=event(2).encode(), headers=STREAM)

    client, server = serve(answer)
    told = follow(client, "p", lambda: len(server.asked) == 10)
    assert [line.line for line in told] == ["line 1", "line 2"]
    assert {asked.headers.get("Last-Event-ID") for asked in server.asked[1:]} == {"1"}


def test_a_server_that_never_begins_to_answer_is_a_failure(serve) -> None:
    client, server = serve(lambda _: Reply(drop=True, hold=0.4))
    with pytest.raises(ApiError, match="timed out"):
        list(follow(client, "p", lambda: False))
    assert len(server.asked) == 6


def test_a_log_that_is_asked_for_too_often_is_asked_for_after_the_wait(serve) -> None:
    def answer(_: Asked) -> Reply:
        if len(server.asked) == 1:
            return Reply(429, headers={"Retry-After": "1"})
        return Reply(raw=event(1).encode(), headers=STREAM)

    client, server = serve(answer)
    began = time.monotonic()
    assert [line.line for line in follow(client, "p", lambda: len(server.asked) > 1)] == ["line 1"]
    assert time.monotonic() - began >= 1


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_an_event_has_an_end_whatever_its_lines_are(serve, end: str) -> None:
    many = "".join(event(number, end) for number in range(20_000))  # larger than one event may be
    assert len(many) > LONGEST
    client, _ = serve(lambda _: Reply(raw=many.encode(), headers=STREAM))
    assert len(list(follow(client, "p", lambda: True))) == 20_000
    for line in (f"data:{end}", f"data: {'x' * 900}{end}"):
        one = line * (3 * LONGEST // 2 // len(line))
        client, _ = serve(lambda _, one=one: Reply(raw=one.encode(), headers=STREAM))
        with pytest.raises(HostileAnswerError, match="longer than 1 MiB"):
            list(follow(client, "p", lambda: True))

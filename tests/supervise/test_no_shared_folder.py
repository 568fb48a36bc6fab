"""Two run directories that share nothing, over a real TCP connection."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from launcher.rundir.files import read_json, replace_json
from launcher.rundir.layout import RunDir
from launcher.supervise.attempt import NodePlace
from launcher.supervise.no_shared_folder import file_sync
from launcher.supervise.no_shared_folder import link as module
from launcher.supervise.no_shared_folder.link import Hub, Spoke
from launcher.supervise.no_shared_folder.wire import WireError, connect
from launcher.supervise.nodes import NodesError
from tests.lab import wait_for

TOKEN = "5d1e0a3b8a9f2b7c"


def free_place(rank: int) -> NodePlace:
    for base in range(64000, 65000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", base - 1)) != 0:
                return NodePlace(rank, 2, "127.0.0.1", base)
    raise AssertionError("no free port")


class Two:
    """Node 0's and node 1's run directory, and what joins them."""

    def __init__(self, folder: Path) -> None:
        self.here, self.there = RunDir(folder / "0" / "run"), RunDir(folder / "1" / "run")
        for run in (self.here, self.there):
            run.path.mkdir(parents=True)
        self.place = free_place(0)
        self.hub = Hub(self.here, self.place, TOKEN)
        self.spoke = Spoke(self.there, NodePlace(1, 2, "127.0.0.1", self.place.port_base), TOKEN)

    def start(self) -> None:
        self.hub.start(lambda: None)
        self.spoke.start(lambda: None)

    def end(self) -> None:
        other = threading.Thread(target=self.spoke.close)
        other.start()
        self.hub.close()
        other.join()


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Two]:
    monkeypatch.setattr(module, "AWAY_SECONDS", 0.5)
    monkeypatch.setattr(module, "END_SECONDS", 3600.0)  # no end waits for it
    two = Two(tmp_path)
    yield two
    two.end()


def attempt(run: RunDir, number: int = 0) -> Path:
    path = run.attempt(number).path
    for folder in ("nodes", "errors", "logs/node-01", "memory"):
        (path / folder).mkdir(parents=True, exist_ok=True)
    return path


def seen(what: Callable[[], object]) -> None:
    wait_for(what, "the other node's file")


def test_an_abort_and_a_cancel_reach_the_other_node(two: Two) -> None:
    two.there.cancel.write_text("of an earlier start")
    two.start()
    assert not two.there.cancel.exists()
    here = attempt(two.here)
    replace_json(here / "open.json", {"incarnation": "a"})
    there = two.there.attempt(0).path
    seen((there / "open.json").exists)
    replace_json(here / "nodes/abort.json", {"silent": [1]})
    two.here.cancel.write_text("1\n")
    seen(lambda: read_json(there / "nodes/abort.json") == {"silent": [1]})
    seen(lambda: two.there.cancel.read_text() == "1\n")
    two.here.cancel.write_text("2\n")
    seen(lambda: two.there.cancel.read_text() == "2\n")
    (there / "recipe.json").write_text("{}")
    time.sleep(0.3)
    assert not (here / "recipe.json").exists(), "node 0's is not the others' to write"


def test_a_log_that_cannot_be_written_holds_nothing_else_back_and_no_event_comes_twice(two: Two) -> None:
    there, here = attempt(two.there), attempt(two.here)
    (here / "logs/node-01/rank-001.out").mkdir()  # as good as a full disk: it cannot be written
    (two.here.path / "events.jsonl").mkdir()
    (there / "logs/node-01/rank-001.out").write_text("a line\n")
    two.there.event("downgrade")
    two.start()
    (there / "stop").write_text("preempted")
    replace_json(there / "nodes/node-01.alive.json", {"time": 1})
    seen(lambda: read_json(here / "nodes/node-01.alive.json") == {"time": 1})
    assert (here / "stop").read_text() == "preempted", "rank 0 is there"
    (two.here.path / "events.jsonl").rmdir()
    for link in list(two.hub._links.values()):
        link.wire.close()
    seen(two.here.events.exists)
    time.sleep(0.5)
    assert [event.kind for event in two.here.read_events()] == ["downgrade"]


def test_a_heartbeat_arrives_on_a_full_disk(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    beat = "nodes/node-01.alive.json"
    here, there = attempt(two.here) / beat, attempt(two.there) / beat
    two.start()
    replace_json(there, {})
    seen(here.exists)
    monkeypatch.setattr(file_sync, "replace_bytes", Mock(side_effect=OSError("No space left on device")))
    for _ in range(2):
        before = here.stat().st_mtime_ns
        os.utime(there)
        seen(lambda before=before: here.stat().st_mtime_ns != before)


def test_who_sees_that_a_node_has_ended_sees_all_that_it_said_before(two: Two) -> None:
    there, here = attempt(two.there), two.here.attempt(0).path
    two.start()
    log = there / "logs/node-01/rank-001.out"
    (there / "logs/node-01/rank-001.err").touch()
    lines = b"".join(b"%08d %s\n" % (number, b"x" * 90) for number in range(40_000))  # several parts
    log.write_bytes(lines)
    replace_json(there / "errors/rank-001.json", {"rank": 1})
    replace_json(there / "nodes/node-01.ended.json", {"exit_code": 1})
    seen((here / "nodes/node-01.ended.json").exists)
    assert (here / "logs/node-01/rank-001.out").read_bytes() == lines
    assert (here / "logs/node-01/rank-001.err").read_bytes() == b"", "a rank that has begun and said nothing"
    assert read_json(here / "errors/rank-001.json") == {"rank": 1}


def test_a_connection_that_breaks_costs_no_line_and_none_comes_twice(two: Two) -> None:
    there, here = attempt(two.there), two.here.attempt(0).path
    two.here.event("mark")
    two.start()
    log, copy = there / "logs/node-01/rank-001.out", here / "logs/node-01/rank-001.out"
    for number in range(3):
        with open(log, "a") as file:
            file.write(f"line {number}\nhalf of")
        two.there.event("memory", number=number)
        seen(lambda number=number: f"line {number}\n" in copy.read_text())
        seen(lambda number=number: len(two.here.read_events()) == number + 2)
        (cut,) = two.hub._links.values()
        cut.wire.close()
        with open(log, "a") as file:
            file.write(" a line\n")
        seen(lambda number=number: copy.read_text().count("half of a line\n") == number + 1)
    with open(log, "a") as file:
        file.write("the last word")
    two.end()
    assert copy.read_bytes() == log.read_bytes()
    assert [event.as_json().get("number") for event in two.here.read_events()] == [None, 0, 1, 2]


def test_node_0_that_ends_tells_the_others_and_waits_for_their_last_words(two: Two) -> None:
    two.start()
    there = attempt(two.there)
    wait_for(lambda: two.hub._links, "connection")
    ending = threading.Thread(target=two.hub.close)
    ending.start()
    wait_for(lambda: two.spoke.closed_by_node_0, "word of the end")
    (there / "logs/node-01/torchrun.err").write_text("bye")
    two.spoke.close()
    ending.join(240)
    assert not ending.is_alive()
    assert (two.here.attempt(0).path / "logs/node-01/torchrun.err").read_text() == "bye"


def test_a_node_that_is_gone_is_not_waited_for_long(two: Two) -> None:
    two.hub.start(lambda: None)
    wire = connect(("127.0.0.1", two.place.mirror_port), TOKEN, 1)
    wire.receive()
    wire.close()
    two.hub.close()


def test_who_does_not_know_the_token_is_told_nothing_and_writes_nothing(two: Two) -> None:
    two.hub.start(lambda: None)
    address = ("127.0.0.1", two.place.mirror_port)
    with pytest.raises(WireError):
        connect(address, "another", 1)
    with socket.create_connection(address) as connection:
        connection.settimeout(5)
        connection.sendall(b"\0" * 68)
        answer = b""
        while part := connection.recv(1000):
            answer += part
    assert len(answer) == 32, "a random challenge, and the end"
    assert not two.hub._links
    wire = connect(address, TOKEN, 1)
    assert wire.receive()[0] == {"have": {}}
    for path in ("run.json", "../run/cancel", "attempts/000/logs/node-02/rank-001.out", "cancel"):
        wire = connect(address, TOKEN, 1)
        wire.receive()
        wire.send({"path": path, "from": 0}, b"x")
        with pytest.raises(WireError, match="closed"):
            wire.receive()
    assert [path.name for path in two.here.path.iterdir()] == []


def test_a_port_that_is_taken_is_a_clear_refusal(two: Two) -> None:
    with pytest.raises(NodesError, match=r"Address already in use.*; start the run again"):
        Hub(two.here, two.place, TOKEN)

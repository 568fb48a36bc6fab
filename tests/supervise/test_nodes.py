"""The agreement of several supervisors, through a real directory."""

from __future__ import annotations

import threading
from pathlib import Path
from unittest.mock import Mock

import pytest

from launcher.rundir.files import replace_json
from launcher.rundir.layout import RunDir
from launcher.supervise import nodes as module
from launcher.supervise import paused_clock
from launcher.supervise.attempt import Ended, NodePlace
from launcher.supervise.nodes import Nodes, NodesError


@pytest.fixture
def four(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Nodes]:
    monkeypatch.setattr(module, "LOST_SECONDS", 0.6)
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(module, "LOOKS_PER_SECOND", 1e9)
    monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.05)
    run = RunDir(tmp_path)
    return [
        Nodes(run, NodePlace(rank, 4, "10.0.0.1", 61007), replace_json, lambda: False) for rank in range(4)
    ]


def opened(four: list[Nodes], number: int = 0):
    attempt = four[0].run.attempt(number)
    (attempt.path / "nodes").mkdir(parents=True)
    four[0].open_attempt(attempt)
    return attempt


def test_the_others_wait_for_the_attempt_of_this_incarnation(four: list[Nodes]) -> None:
    stale = Nodes(four[0].run, NodePlace(0, 4, "10.0.0.1", 61006), replace_json, lambda: False)
    (four[0].run.attempt(0).path).mkdir(parents=True)
    stale.open_attempt(four[0].run.attempt(0))
    timer = threading.Timer(0.3, lambda: opened(four, 1))
    timer.start()
    assert four[2].wait_for_attempt(after=-1).number == 1
    timer.join()


def test_a_failure_on_one_node_reaches_every_other_through_node_0(four: list[Nodes]) -> None:
    attempt = opened(four)
    for node in four:
        node.beat(attempt)
    assert not any(node.another_node_failed(attempt) for node in four)
    four[3].report(attempt, Ended(1), oom_kills=0)
    assert [node.another_node_failed(attempt) for node in four[:3]] == [True, True, True]


def test_a_node_that_has_not_begun_is_waited_for_longer_than_one_that_has_fallen_silent(
    four: list[Nodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a pod that still pulls its image."""
    attempt = opened(four)
    four[3].beat(attempt)
    now = 1000.0
    monkeypatch.setattr(four[0]._clock, "now", lambda: now)
    four[0]._began = now
    assert not any(four[0]._lost(attempt, node) for node in (2, 3))
    now += four[0].lost_after + 1
    assert four[0]._lost(attempt, 3) and not four[0]._lost(attempt, 2)
    assert four[0]._lost(attempt, 2, may_begin=False), "the run is to stop"
    now += module.START_SECONDS
    assert four[0]._lost(attempt, 2)


def test_a_node_on_a_full_disk_still_beats(four: list[Nodes], monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = opened(four)
    four[3].beat(attempt)
    four[3].write = Mock(side_effect=AssertionError("it needs space"))
    now, file = 1000.0, attempt.path / "nodes/node-03.alive.json"
    for node in (four[0], four[3]):
        monkeypatch.setattr(node._clock, "now", lambda: now)
    assert not four[0]._lost(attempt, 3)
    for _ in range(3):
        now, before = now + 0.9 * four[0].lost_after, module._heartbeat_of(file)
        while module._heartbeat_of(file) == before:  # a file's time changes every few milliseconds
            four[3]._last_beat = 0.0
            four[3].beat(attempt)
        assert not four[0]._lost(attempt, 3)


def test_a_node_without_a_heartbeat_is_lost_and_the_run_does_not_wait_for_it(four: list[Nodes]) -> None:
    attempt = opened(four)
    four[3].beat(attempt)
    for node in four[:3]:
        node.report(attempt, Ended(0), oom_kills=0)
    reports, lost = four[0].wait_for_reports(attempt, lambda: False, lambda: False)
    assert sorted(reports) == [0, 1, 2] and lost == (3,)


def test_who_is_silent_when_the_time_to_stop_is_over_is_not_waited_for(four: list[Nodes]) -> None:
    attempt = opened(four)
    for node in four:
        node.lost_after = 1e9
    for node in four[:3]:
        node.report(attempt, Ended(0), oom_kills=0)
    reports, lost = four[0].wait_for_reports(attempt, lambda: True, lambda: False)
    assert sorted(reports) == [0, 1, 2] and lost == (3,)


def test_nodes_that_wait_hear_that_no_attempt_follows(four: list[Nodes]) -> None:
    replace_json(four[0].run.closed, {"incarnation": "10.0.0.1:61006", "exit_code": 0})  # of an earlier life
    timer = threading.Timer(0.3, lambda: four[0].close(15))
    timer.start()
    assert four[2].wait_for_attempt(after=-1) == 15
    timer.join()


@pytest.mark.parametrize("opens", [True, False])
def test_a_node_that_is_asked_to_stop_waits_a_moment_for_node_0(
    four: list[Nodes], monkeypatch: pytest.MonkeyPatch, opens: bool
) -> None:
    monkeypatch.setattr(module, "CLOSING_SECONDS", 60.0 if opens else 0.3)
    four[2].asked_to_stop = lambda: True
    if not opens:
        with pytest.raises(NodesError, match="asked to stop while waiting for node 0"):
            four[2].wait_for_attempt(after=-1)
        return
    timer = threading.Timer(0.3, lambda: opened(four))
    timer.start()
    attempt = four[2].wait_for_attempt(after=-1)
    assert not isinstance(attempt, int) and attempt.number == 0
    timer.join()


def test_a_slow_node_that_still_beats_is_waited_for(four: list[Nodes]) -> None:
    attempt = opened(four)
    for node in four[:3]:
        node.report(attempt, Ended(0), oom_kills=0)
    stop = threading.Event()

    def slow() -> None:
        for _ in range(20):
            four[3].beat(attempt)
            stop.wait(0.1)
        four[3].report(attempt, Ended(0), oom_kills=2)

    thread = threading.Thread(target=slow)
    thread.start()
    reports, lost = four[0].wait_for_reports(attempt, lambda: False, lambda: False)
    thread.join()
    assert lost == () and reports[3]["oom_kills"] == 2


def test_the_decision_of_node_0_reaches_the_others(four: list[Nodes]) -> None:
    attempt = opened(four)
    four[0].announce(attempt, go_on=True, exit_code=10)
    assert four[1].wait_for_announcement(attempt) == (True, 10, False)


def test_a_dead_node_0_does_not_hold_the_others_for_ever(four: list[Nodes]) -> None:
    attempt = opened(four)
    with pytest.raises(NodesError, match="stopped sending heartbeats"):
        four[1].wait_for_announcement(attempt)


def test_a_node_0_that_was_killed_and_starts_again_calls_the_others_out_of_its_attempt(
    four: list[Nodes],
) -> None:
    """As in a cluster of pods, each of whose containers starts again by itself."""
    over, left = opened(four, 0), opened(four, 1)
    four[0].announce(over, go_on=True, exit_code=10)
    assert not four[2].another_node_failed(left)
    again = Nodes(four[0].run, four[0].place, replace_json, lambda: False)
    again.take_over()
    assert four[2].another_node_failed(left) and not four[2].another_node_failed(over)
    assert four[2].wait_for_announcement(left) == (True, 0, False)


def test_another_node_that_was_killed_knows_which_attempt_it_took_part_in(four: list[Nodes]) -> None:
    attempts = [opened(four, number) for number in range(3)]
    for attempt in attempts[:2]:
        four[1].beat(attempt)
        four[1]._last_beat = float("-inf")
    again = Nodes(four[1].run, four[1].place, replace_json, lambda: False)
    assert again.abandoned_attempt() == attempts[1] and four[2].abandoned_attempt() is None
    saving = four[0].run.saving(1)
    (saving.path / "nodes").mkdir(parents=True)
    four[0].open_attempt(saving)
    again.beat(saving)
    assert again.abandoned_attempt() == saving


@pytest.mark.slow
def test_a_request_to_stop_ends_the_wait(tmp_path: Path) -> None:
    waiting = Nodes(RunDir(tmp_path), NodePlace(1, 2, "10.0.0.1"), replace_json, lambda: True)
    with pytest.raises(NodesError, match="asked to stop"):
        waiting.wait_for_attempt(after=-1)


def test_nodes_that_were_suspended_together_have_not_lost_each_other(
    four: list[Nodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(paused_clock.time, "monotonic", lambda: now)
    attempt = opened(four)
    first, second = (
        Nodes(four[0].run, NodePlace(rank, 2, "10.0.0.1", 61007), replace_json, lambda: False)
        for rank in range(2)
    )
    now += 0.1
    second.beat(attempt)
    assert not first._lost(attempt, 1)
    monkeypatch.setattr(paused_clock, "LONGEST_SECONDS", 0.2)
    now += 3600.0
    assert not first._lost(attempt, 1)
    for _ in range(4):
        now += 0.2
        lost = first._lost(attempt, 1)
    assert lost, "it has run for longer than LOST_SECONDS since"

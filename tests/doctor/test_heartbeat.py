"""A node that shows no sign of life is lost; one whose folder is slow, or whose network is broken, is not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from launcher.doctor import heartbeat as heartbeat_module
from launcher.doctor.heartbeat import HeartbeatMonitor, heartbeat
from launcher.doctor.measure.listener import Listener
from launcher.doctor.order_files import Orders
from launcher.supervise.ports import free_port
from tests.lab import wait_for


class Other:
    """Node 1 on this machine. Its heartbeat and its listener can be ended separately."""

    def __init__(self, folder: Path) -> None:
        self.listener = Listener(free_port())
        self._heartbeat = ExitStack()
        identity = {"address": "127.0.0.1", "ports": self.listener.ports}
        self._heartbeat.enter_context(heartbeat(Orders(folder, 1, 2), identity))

    def end_heartbeat(self) -> None:
        self._heartbeat.close()

    def end_listener(self) -> None:
        self.listener.__exit__()


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Other]:
    monkeypatch.setattr(heartbeat_module, "BEAT_SECONDS", 0.01)
    node = Other(tmp_path)
    wait_for(lambda: Orders(tmp_path, 0, 2).pulses(), "first heartbeat")
    yield node
    node.end_heartbeat()
    node.end_listener()


def test_a_node_without_any_sign_of_life_is_lost(tmp_path: Path, other: Other) -> None:
    monitor = HeartbeatMonitor(Orders(tmp_path, 0, 2))
    other.end_heartbeat()
    other.end_listener()
    wait_for(lambda: monitor.check() or monitor.lost == {1}, "lost node")  # type: ignore[func-returns-value]


def test_a_node_whose_heartbeat_is_late_answers_over_the_network(tmp_path: Path, other: Other) -> None:
    monitor = HeartbeatMonitor(Orders(tmp_path, 0, 2))
    other.end_heartbeat()
    for _ in range(3 * heartbeat_module.LOST_BEATS):
        monitor.check()
    assert monitor.lost == set()


def test_a_node_that_cannot_be_reached_has_its_heartbeat(tmp_path: Path, other: Other) -> None:
    monitor = HeartbeatMonitor(Orders(tmp_path, 0, 2))
    other.end_listener()
    for number in range(2 * heartbeat_module.LOST_BEATS):
        before = Orders(tmp_path, 0, 2).pulses()
        if not number % 10:
            wait_for(lambda before=before: Orders(tmp_path, 0, 2).pulses() != before, "next heartbeat")
        monitor.check()
    assert monitor.lost == set()

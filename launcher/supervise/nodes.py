"""How the supervisors of several nodes agree: through files in the run directory, node 0 decides.

Where the nodes share no folder, `apart` brings these files to each of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launcher.runs.files import read_json
from launcher.runs.layout import AttemptDir, RunDir
from launcher.supervise.attempt import Ended, NodePlace
from launcher.supervise.host import disk_full

HEARTBEAT_SECONDS = 2.0
HEARTBEATS_PER_SECOND = 50
"Of all nodes together: each one replaces a file on the shared file system, whose servers count them."
LOST_SECONDS = 60.0
"Without a new heartbeat for this long a node counts as lost; a network file system shows it late."
LOST_HEARTBEATS = 4
"... or for so many of them, where many nodes beat slowly."
START_SECONDS = 600.0
"For node 0 to open the first attempt, on a cluster whose nodes start one after the other."
POLL_SECONDS = 0.2
LOOK_SECONDS = 1.0
LOOKS_PER_SECOND = 100
"At the nodes' files, by node 0."


class NodesError(Exception):
    """The nodes cannot agree; the message says which one is missing."""


class Nodes:
    """The agreement, as seen by one node. `write` survives a full disk."""

    def __init__(
        self,
        run: RunDir,
        place: NodePlace,
        write: Callable[[Path, Any], None],
        asked_to_stop: Callable[[], bool],
    ) -> None:
        self.run, self.place, self.write, self.asked_to_stop = run, place, write, asked_to_stop
        # A requeued job has another port base, so files of its earlier life do not confuse it.
        self.incarnation = f"{place.rendezvous_host}:{place.port_base}"
        self.beats_every = max(HEARTBEAT_SECONDS, place.count / HEARTBEATS_PER_SECOND)
        self.lost_after = max(LOST_SECONDS, LOST_HEARTBEATS * self.beats_every)
        self._looks_every = max(LOOK_SECONDS, place.count / LOOKS_PER_SECOND)
        self._last_beat = 0.0
        self._next_look = 0.0
        # (attempt, node) -> (its newest heartbeat, when it appeared by our clock): clocks of nodes differ.
        self._heard: dict[tuple[int, int], tuple[Any, float]] = {}

    @property
    def leader(self) -> bool:
        return self.place.rank == 0

    @property
    def several(self) -> bool:
        return self.place.count > 1

    def open_attempt(self, attempt: AttemptDir) -> None:
        """Node 0: every file of the attempt is in place, the others may start."""
        if self.several:
            self.write(attempt.path / "open.json", {"incarnation": self.incarnation})

    def wait_for_attempt(self, after: int) -> AttemptDir:
        """Other nodes: the attempt that node 0 opened. Raises NodesError when none comes."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            for attempt in self.run.attempts():
                opened = read_json(attempt.path / "open.json") or {}
                if attempt.number > after and opened.get("incarnation") == self.incarnation:
                    return attempt
            self._wait("for node 0 to open an attempt")
        raise NodesError(f"node 0 opened no attempt within {START_SECONDS:.0f} s")

    def beat(self, attempt: AttemptDir) -> None:
        """Show that this node is alive; cheap to call often."""
        if self.several and time.monotonic() > self._last_beat + self.beats_every:
            self._last_beat = time.monotonic()
            self.write(self._file(attempt, self.place.rank, "alive"), {"time": time.time()})

    def report(self, attempt: AttemptDir, ended: Ended, oom_kills: int) -> None:
        """This node's torchrun has ended."""
        if self.several:
            full = disk_full(self.run.path)
            value = {"exit_code": ended.exit_code, "oom_kills": oom_kills, "disk_full": full}
            self.write(self._file(attempt, self.place.rank, "ended"), value)

    def in_trouble(self, attempt: AttemptDir) -> bool:
        """Another node ended badly or is lost: to wait for it in a collective would be in vain.

        Node 0 looks at every node about once a second (less often where there are hundreds) and tells the
        others through one file: the shared file system must not be asked by all about all.
        """
        if not self.several or time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + self._looks_every
        abort = attempt.path / "nodes" / "abort.json"
        if not self.leader:
            return abort.exists() or self._lost(attempt, 0)
        reports = self.reports(attempt)
        silent = [n for n in range(self.place.count) if n not in reports and self._lost(attempt, n)]
        if not silent and not any(report["exit_code"] for report in reports.values()):
            return False
        self.write(abort, {"silent": silent, "ended": reports})
        return True

    def reports(self, attempt: AttemptDir) -> dict[int, dict[str, Any]]:
        """What every node that has ended reported."""
        found = {node: read_json(self._file(attempt, node, "ended")) for node in range(self.place.count)}
        return {node: report for node, report in found.items() if report is not None}

    def wait_for_reports(self, attempt: AttemptDir) -> tuple[dict[int, dict[str, Any]], tuple[int, ...]]:
        """Node 0: every node's report, and the nodes that are lost."""
        while self.several:
            reports = self.reports(attempt)
            missing = [node for node in range(self.place.count) if node not in reports]
            lost = [node for node in missing if self._lost(attempt, node)]
            if len(lost) == len(missing):
                return reports, tuple(lost)
            self.beat(attempt)
            time.sleep(POLL_SECONDS)
        return {}, ()

    def announce(self, attempt: AttemptDir, go_on: bool, exit_code: int) -> None:
        """Node 0: whether another attempt follows."""
        if self.several:
            self.write(attempt.path / "next.json", {"go_on": go_on, "exit_code": exit_code})

    def wait_for_announcement(self, attempt: AttemptDir) -> tuple[bool, int]:
        """Other nodes: (another attempt follows, exit code). Raises NodesError when node 0 is gone."""
        while (value := read_json(attempt.path / "next.json")) is None:
            if self._lost(attempt, 0):
                raise NodesError("node 0 gave no sign of life after the attempt")
            self.beat(attempt)
            time.sleep(POLL_SECONDS)
        return bool(value["go_on"]), int(value["exit_code"])

    def _wait(self, what: str) -> None:
        if self.asked_to_stop():
            raise NodesError(f"asked to stop while waiting {what}")
        time.sleep(POLL_SECONDS)

    def _lost(self, attempt: AttemptDir, node: int) -> bool:
        """No new heartbeat for `lost_after` seconds, counted from the first look."""
        beat = read_json(self._file(attempt, node, "alive"))
        key = (attempt.number, node)
        if key not in self._heard or self._heard[key][0] != beat:
            self._heard[key] = (beat, time.monotonic())
        return node != self.place.rank and time.monotonic() > self._heard[key][1] + self.lost_after

    def _file(self, attempt: AttemptDir, node: int, kind: str) -> Path:
        return attempt.path / "nodes" / f"node-{node:02d}.{kind}.json"

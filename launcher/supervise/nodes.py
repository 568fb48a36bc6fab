"""How the supervisors of several nodes agree: through files in the run directory, node 0 decides."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from launcher.runs.files import read_json, replace_json
from launcher.runs.layout import AttemptDir, RunDir
from launcher.supervise.attempt import Ended, NodePlace

HEARTBEAT_SECONDS = 2.0
LOST_SECONDS = 60.0
"Without a heartbeat for this long a node counts as lost; file systems may show it late."
START_SECONDS = 600.0
"For node 0 to open the first attempt, on a cluster whose nodes start one after the other."


class NodesError(Exception):
    """The nodes cannot agree; the message says which one is missing."""


class Nodes:
    """The agreement, as seen by one node. With one node every question has a trivial answer."""

    def __init__(self, run: RunDir, place: NodePlace) -> None:
        self.run, self.place = run, place
        # A requeued job has another port base, so files of its earlier life do not confuse it.
        self.incarnation = f"{place.rendezvous_host}:{place.port_base}"
        self._last_beat = 0.0

    @property
    def leader(self) -> bool:
        return self.place.rank == 0

    def open_attempt(self, attempt: AttemptDir) -> None:
        """Node 0: every file of the attempt is in place, the others may start."""
        replace_json(attempt.path / "open.json", {"incarnation": self.incarnation})

    def wait_for_attempt(self, after: int) -> AttemptDir:
        """Other nodes: the attempt that node 0 opened. Raises NodesError when none comes."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            for attempt in self.run.attempts():
                opened = read_json(attempt.path / "open.json") or {}
                if attempt.number > after and opened.get("incarnation") == self.incarnation:
                    return attempt
            time.sleep(0.2)
        raise NodesError(f"node 0 opened no attempt within {START_SECONDS:.0f} s")

    def beat(self, attempt: AttemptDir) -> None:
        """Show that this node is alive; cheap to call often."""
        if self.place.count > 1 and time.monotonic() > self._last_beat + HEARTBEAT_SECONDS:
            self._last_beat = time.monotonic()
            with contextlib.suppress(OSError):
                replace_json(self._file(attempt, self.place.rank, "alive"), {"time": time.time()})

    def report(self, attempt: AttemptDir, ended: Ended, oom_kills: int) -> None:
        if self.place.count > 1:
            value = {"exit_code": ended.exit_code, "oom_kills": oom_kills}
            replace_json(self._file(attempt, self.place.rank, "ended"), value)

    def someone_failed(self, attempt: AttemptDir) -> bool:
        """Another node ended badly: waiting for it in a collective would be in vain."""
        return any(report.get("exit_code") != 0 for report in self.reports(attempt).values())

    def reports(self, attempt: AttemptDir) -> dict[int, dict[str, Any]]:
        """What every node that has ended reported."""
        if self.place.count == 1:
            return {}
        found = {n: read_json(self._file(attempt, n, "ended")) for n in range(self.place.count)}
        return {node: report for node, report in found.items() if report is not None}

    def wait_for_reports(self, attempt: AttemptDir) -> tuple[dict[int, dict[str, Any]], tuple[int, ...]]:
        """Node 0: every node's report, and the nodes that are lost."""
        first_seen = time.time()
        while True:
            reports = self.reports(attempt)
            missing = [node for node in range(self.place.count) if node not in reports]
            lost = [
                node for node in missing if time.time() - self._seen(attempt, node, first_seen) > LOST_SECONDS
            ]
            if len(lost) == len(missing):
                return reports, tuple(lost)
            time.sleep(0.2)

    def announce(self, attempt: AttemptDir, go_on: bool, exit_code: int) -> None:
        """Node 0: whether another attempt follows."""
        if self.place.count > 1:
            replace_json(attempt.path / "next.json", {"go_on": go_on, "exit_code": exit_code})

    def wait_for_announcement(self, attempt: AttemptDir) -> tuple[bool, int]:
        """Other nodes: (another attempt follows, exit code). Raises NodesError when node 0 is gone."""
        start = time.time()
        while (value := read_json(attempt.path / "next.json")) is None:
            if time.time() - self._seen(attempt, 0, start) > 2 * LOST_SECONDS:
                raise NodesError("node 0 gave no sign of life after the attempt")
            time.sleep(0.2)
        return bool(value["go_on"]), int(value["exit_code"])

    def _seen(self, attempt: AttemptDir, node: int, otherwise: float) -> float:
        if node == self.place.rank:
            return time.time()
        record = read_json(self._file(attempt, node, "alive")) or {}
        return max(float(record.get("time", 0)), otherwise)

    def _file(self, attempt: AttemptDir, node: int, kind: str) -> Any:
        folder = attempt.path / "nodes"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"node-{node:02d}.{kind}.json"

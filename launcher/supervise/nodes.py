"""Coordinate the supervisors of several nodes through files in the run directory. Node 0 decides.

If the nodes share no folder, `no_shared_folder` copies these files to each of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from launcher.rundir.files import open_regular, read_json
from launcher.rundir.layout import AttemptDir, RunDir
from launcher.supervise.attempt import Ended, NodePlace
from launcher.supervise.host import disk_full
from launcher.supervise.paused_clock import AwakeClock

HEARTBEAT_SECONDS = 2.0
HEARTBEATS_PER_SECOND = 50
"Limit for all nodes together. Each heartbeat changes the time of a file on the shared file system."
LOST_SECONDS = 60.0
"A node counts as lost after this long without a heartbeat. A network file system shows them late."
LOST_HEARTBEATS = 4
"Heartbeats that a node may miss if many nodes beat slowly, or if the time to stop is over."
CLOSING_SECONDS = 15.0
"How long to wait for node 0 to close the run after a request to stop. Node 0 usually got it too."
START_SECONDS = 600.0
"""How long node 0 and the others wait for each other to begin. Some clusters start nodes one after the other,
and a pod may pull its image for minutes longer than another."""
POLL_SECONDS = 0.2
LOOK_SECONDS = 1.0
LOOKS_PER_SECOND = 100
"Limit for node 0's checks of the nodes' files, over all nodes."


class NodesError(Exception):
    """The nodes cannot coordinate. The message says which node is missing."""


class Nodes:
    """One node's view of the coordination. `write` must survive a full disk. A single node writes nothing."""

    def __init__(
        self,
        run: RunDir,
        place: NodePlace,
        write: Callable[[Path, Any], None],
        asked_to_stop: Callable[[], bool],
    ) -> None:
        self.run, self.place, self.asked_to_stop = run, place, asked_to_stop
        self.write = write if self.several else lambda path, value: None
        # A requeued job has another port base, so that files from before the requeue do not confuse it.
        self.incarnation = f"{place.rendezvous_host}:{place.port_base}"
        self.beats_every = max(HEARTBEAT_SECONDS, place.count / HEARTBEATS_PER_SECOND)
        self.lost_after = max(LOST_SECONDS, LOST_HEARTBEATS * self.beats_every)
        self._looks_every = max(LOOK_SECONDS, place.count / LOOKS_PER_SECOND)
        self._clock = AwakeClock()  # nodes that were suspended together must not count as lost
        self._last_beat = -self.beats_every
        self._will_save = False
        "Whether node 0 starts a save next, even if the run must stop."
        self._asked_at: float | None = None
        "When this node was asked to stop while it waited for an attempt."
        self._next_look = 0.0
        # (attempt, node) -> (newest heartbeat, when it was first seen by this node's clock). Clocks differ.
        self._heartbeats: dict[tuple[int, int], tuple[tuple[int, int] | None, float]] = {}
        self._began = self._clock.now()
        self._joined: set[int] = set()
        "Nodes that have sent a heartbeat."

    @property
    def leader(self) -> bool:
        return self.place.rank == 0

    @property
    def several(self) -> bool:
        return self.place.count > 1

    def open_attempt(self, attempt: AttemptDir) -> None:
        """Node 0: tell the other nodes to start. Call it when every file of the attempt is in place."""
        self.write(attempt.path / "open.json", {"incarnation": self.incarnation})

    def take_over(self) -> None:
        """Node 0: tell the other nodes to end the attempt of an earlier supervisor of node 0 that was killed.

        The container of a pod may restart while those of the other nodes keep running.
        """
        for attempt in self.run.starts():
            if self._opened(attempt) and not (attempt.path / "next.json").exists():
                self.write(_abort(attempt), {"silent": [], "ended": {}})
                self.announce(attempt, True, 0)

    def abandoned_attempt(self) -> AttemptDir | None:
        """Other nodes: return the last attempt of an earlier supervisor of this node that was killed."""
        abandoned = (
            attempt
            for attempt in self.run.starts()
            if self._opened(attempt) and self._file(attempt, self.place.rank, "alive").exists()
        )
        return max(abandoned, key=lambda attempt: (attempt.number, attempt.only_saves), default=None)

    def close(self, exit_code: int) -> None:
        """Node 0: tell the other nodes that no attempt follows, whatever was announced before."""
        self.write(self.run.closed, {"incarnation": self.incarnation, "exit_code": exit_code})

    def wait_for_attempt(self, after: int) -> AttemptDir | int:
        """Other nodes: wait for node 0 to open an attempt after `after`, or to save the state of `after`.

        Return that attempt, or the run's exit code if node 0 closed the run. Raises NodesError if node 0 does
        neither.
        """
        deadline = self._clock.now() + START_SECONDS
        while self._clock.now() < deadline:
            later = (attempt for attempt in self.run.attempts() if attempt.number > after)
            for attempt in (self.run.saving(after), *later):
                if self._opened(attempt):
                    return attempt
            closed = read_json(self.run.closed) or {}
            if closed.get("incarnation") == self.incarnation and not self._will_save:
                return int(closed["exit_code"])
            if self.asked_to_stop() and not self._will_save:
                self._asked_at = self._asked_at or self._clock.now()
                if self._clock.now() > self._asked_at + CLOSING_SECONDS:
                    raise NodesError("asked to stop while waiting for node 0 to open an attempt")
            time.sleep(POLL_SECONDS)
        raise NodesError(f"node 0 opened no attempt within {START_SECONDS:.0f} s")

    def beat(self, attempt: AttemptDir) -> None:
        """Show that this node is alive. Cheap to call often."""
        now = self._clock.now()
        if self.several and now > self._last_beat + self.beats_every:
            self._last_beat = now
            file = self._file(attempt, self.place.rank, "alive")
            try:
                os.utime(file)  # needs no space, so that a full disk does not end the run
            except FileNotFoundError:
                self.write(file, {})
            except OSError:
                pass

    def report(self, attempt: AttemptDir, ended: Ended, oom_kills: int) -> None:
        """Report that the start script of this node has ended."""
        full = disk_full(self.run.path)
        value = {"exit_code": ended.exit_code, "oom_kills": oom_kills, "disk_full": full}
        self.write(self._file(attempt, self.place.rank, "ended"), value)

    def another_node_failed(self, attempt: AttemptDir) -> bool:
        """Return whether another node failed or is lost, so that waiting in a collective is pointless.

        Node 0 checks every node about once a second, or less often if there are hundreds. It tells the others
        through one file, because all nodes checking all nodes would overload the shared file system.
        """
        if not self.several or time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + self._looks_every
        if not self.leader:
            return _abort(attempt).exists() or self._lost(attempt, 0)
        reports = self.reports(attempt)
        silent = [n for n in range(self.place.count) if n not in reports and self._lost(attempt, n)]
        if not silent and not any(report["exit_code"] for report in reports.values()):
            return False
        self.write(_abort(attempt), {"silent": silent, "ended": reports})
        return True

    def failed_first(self, attempt: AttemptDir) -> set[int]:
        """Node 0: return the nodes that had failed before node 0 made all others end their ranks."""
        ended = (read_json(_abort(attempt)) or {}).get("ended", {})
        return {int(node) for node, report in ended.items() if report["exit_code"]}

    def reports(self, attempt: AttemptDir) -> dict[int, dict[str, Any]]:
        """Return the reports of the nodes that have ended."""
        reports = {node: read_json(self._file(attempt, node, "ended")) for node in range(self.place.count)}
        return {node: report for node, report in reports.items() if report is not None}

    def wait_for_reports(
        self, attempt: AttemptDir, about_to_die: Callable[[], bool], stops: Callable[[], bool]
    ) -> tuple[dict[int, dict[str, Any]], tuple[int, ...]]:
        """Node 0: wait for the nodes' reports. Return the reports and the lost nodes.

        `about_to_die`: whether this process is about to be killed. Nodes then count as lost after a few
        heartbeats.
        `stops`: whether the run is to stop. Nodes that have not begun are then not waited for any longer.
        """
        while self.several:
            reports = self.reports(attempt)
            missing = [node for node in range(self.place.count) if node not in reports]
            may_begin = not stops()
            lost = [n for n in missing if self._lost(attempt, n, late=about_to_die(), may_begin=may_begin)]
            if len(lost) == len(missing):
                return reports, tuple(lost)
            self.beat(attempt)
            time.sleep(POLL_SECONDS)
        return {}, ()

    def announce(
        self, attempt: AttemptDir, go_on: bool, exit_code: int, *, saves: bool = False, checks: bool = False
    ) -> None:
        """Node 0: announce whether another attempt follows or, if `saves`, a save of this attempt's state.

        With `checks`, every node examines itself first.
        """
        value = {"go_on": go_on or saves, "exit_code": exit_code, "saves": saves, "checks": checks}
        self.write(attempt.path / "next.json", value)

    def report_check(self, attempt: AttemptDir, unfit: str) -> None:
        """Report why this node is unfit for another attempt; empty if it is fit."""
        self.write(self._file(attempt, self.place.rank, "checked"), {"unfit": unfit})

    def unfit(
        self, attempt: AttemptDir, own_result: str, deadline: float, lost: Collection[int]
    ) -> dict[int, str]:
        """Node 0: wait for what the other nodes report about themselves. Return why nodes are unfit.

        `own_result` is what node 0 found about itself. Wait until `deadline`, by time.monotonic, but not for
        the nodes of `lost`, because their supervisors may have ended. A lost node that does not answer is
        unfit.
        """
        results = {0: own_result}
        while True:
            for node in range(1, self.place.count):
                if (checked := read_json(self._file(attempt, node, "checked"))) is not None:
                    results[node] = str(checked.get("unfit", ""))
            if {*range(self.place.count)} <= {*results, *lost}:
                break
            if time.monotonic() > deadline or self.asked_to_stop():
                break
            self.beat(attempt)
            time.sleep(POLL_SECONDS)
        silent = {node: f"node {node} gives no answer" for node in lost if node not in results}
        return {node: why for node, why in {**results, **silent}.items() if why}

    def wait_for_announcement(self, attempt: AttemptDir) -> tuple[bool, int, bool]:
        """Other nodes: return (whether another start follows, exit code, whether nodes examine themselves).

        Raises NodesError if node 0 is lost.
        """
        while (value := read_json(attempt.path / "next.json")) is None:
            if self._lost(attempt, 0):
                raise NodesError("node 0 stopped sending heartbeats after the attempt")
            self.beat(attempt)
            time.sleep(POLL_SECONDS)
        self._will_save = bool(value.get("saves"))
        return bool(value["go_on"]), int(value["exit_code"]), bool(value.get("checks"))

    def _lost(self, attempt: AttemptDir, node: int, *, late: bool = False, may_begin: bool = True) -> bool:
        """Return whether a node had no new heartbeat for `lost_after` seconds, counted from the first check.

        Node 0 gives the others START_SECONDS to begin, if they still `may_begin`. `late`: wait only for
        LOST_HEARTBEATS heartbeats.
        """
        beat = _heartbeat_of(self._file(attempt, node, "alive"))
        if beat is not None:
            self._joined.add(node)
        key = (attempt.number, node)
        if key not in self._heartbeats or self._heartbeats[key][0] != beat:
            self._heartbeats[key] = (beat, self._clock.now())
        limit = LOST_HEARTBEATS * self.beats_every if late else self.lost_after
        until = self._heartbeats[key][1] + limit
        if self.leader and may_begin and not late and node not in self._joined:
            until = max(until, self._began + START_SECONDS)
        return node != self.place.rank and self._clock.now() > until

    def _opened(self, attempt: AttemptDir) -> bool:
        """Return whether node 0 has opened the attempt, in this incarnation."""
        return (read_json(attempt.path / "open.json") or {}).get("incarnation") == self.incarnation

    def _file(self, attempt: AttemptDir, node: int, kind: str) -> Path:
        return attempt.path / "nodes" / f"node-{node:02d}.{kind}.json"


def _heartbeat_of(file: Path) -> tuple[int, int] | None:
    """Return what each heartbeat changes, or None before the first one.

    Open the file, because a network file system may answer `stat` from its cache.
    """
    try:
        with open_regular(file) as opened:
            status = os.fstat(opened.fileno())
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _abort(attempt: AttemptDir) -> Path:
    """Return the path of the file by which node 0 tells the others to end their ranks."""
    return attempt.path / "nodes" / "abort.json"

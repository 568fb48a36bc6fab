"""Append what a framework logs to metrics.jsonl, for a `command:` that does not call `launcher.log`."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from launcher.logs.read import OffsetReader
from launcher.rundir.files import append_json, parsed, read_json, replace_json
from launcher.rundir.layout import RunDir
from launcher.supervise.framework_logs.lines import FROM, FrameworkLines
from launcher.supervise.framework_logs.sources import Source

SECONDS = 1.0
CLOSING_SECONDS = 10.0
"How long the end of a rank waits for the last lines. A hanging file system must not delay it further."
_READ_BYTES = 2**20


class FrameworkLogs:
    """Follows an attempt's logs in a background thread until it is closed.

    Once the script calls `launcher.log`, it copies nothing more. If the disk is full, lines are lost.
    """

    def __init__(
        self, run: RunDir, attempt: int, workdir: Path, since: float, environ: Mapping[str, str]
    ) -> None:
        """`since` is when the rank was started, in Unix seconds, and `environ` its environment."""
        self._metrics = run.metrics
        self._source = Source(run, workdir, since)
        samples = run.read_about().job.batch.global_
        self._lines = FrameworkLines(attempt, samples, since, environ, _first_steps(run, attempt))
        self._first_step = run.attempt(attempt).first_step
        self._written = OffsetReader(run.metrics)
        self._written.offset = self._written.size()
        self._script_reports = False
        self.searched = False
        "Whether the first search has finished."
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Read the last lines, for at most CLOSING_SECONDS, and stop."""
        self._closed.set()
        self._thread.join(CLOSING_SECONDS)

    def _run(self) -> None:
        self._look()
        self.searched = True
        while not self._closed.wait(SECONDS):
            self._look()
        self._look(last=True)

    def _look(self, last: bool = False) -> None:
        with contextlib.suppress(OSError):
            if self._script_reports or self._sees_launcher_log():
                return
            kind, readings = self._source.read(search=last)
            if readings and (lines := self._lines.lines(kind, readings, time.time())):
                append_json(self._metrics, *lines)
                if self._lines.first is not None and not self._first_step.exists():
                    replace_json(self._first_step, {kind: self._lines.first})

    def _sees_launcher_log(self) -> bool:
        while data := self._written.read(_READ_BYTES):
            for line in map(parsed, data.splitlines()):
                copied = not isinstance(line, dict) or FROM in line
                self._script_reports = self._script_reports or not copied
        return self._script_reports


def _first_steps(run: RunDir, attempt: int) -> dict[str, int]:
    """Return {kind of log: number of its first step} of the latest earlier attempt that has recorded it."""
    for earlier in range(attempt - 1, -1, -1):
        record = read_json(run.attempt(earlier).first_step)
        if isinstance(record, dict):
            return {kind: first for kind, first in record.items() if first in (0, 1)}
    return {}

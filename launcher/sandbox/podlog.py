"""A pod's log: numbered lines with times, kept on disk and streamed as Server-Sent Events."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path

from launcher.rundir.time import stamp
from launcher.sandbox.records import seconds

KEPT = 20_000
"Maximum number of lines in memory. The file holds all lines."
LONGEST = 64 * 1024
"Maximum characters of one line."
QUIET = 15.0
"Seconds without a line after which a comment is sent to keep the connection open."


class PodLog:
    """The log of one pod."""

    def __init__(self, file: Path) -> None:
        self._file = open(file, "a")  # noqa: SIM115
        self.lines: deque[tuple[int, str, str, str]] = deque(maxlen=KEPT)
        "The newest lines as (number, time, source, text)."
        self._count = 0
        self._new_line = asyncio.Event()
        self.closed = False

    def add(self, source: str, text: str) -> None:
        self._count += 1
        line = (self._count, stamp(time.time()), source, text[:LONGEST])
        self.lines.append(line)
        self._file.write(json.dumps({"ts": line[1], "source": source, "line": line[3]}) + "\n")
        self._file.flush()
        self._wake()

    def close(self) -> None:
        self.closed = True
        self._file.close()
        self._wake()

    def _wake(self) -> None:
        self._new_line.set()
        self._new_line = asyncio.Event()

    async def follow(self, source: str | None, after: int) -> AsyncIterator[str]:
        """Yield the lines numbered above `after` as events, until the pod is removed."""
        yield ": here\n\n"  # so that the response's headers are sent at once
        while True:
            new_line = self._new_line
            for number, when, origin, text in list(self.lines):
                if number > after:
                    after = number
                    if source in (None, origin):
                        data = json.dumps({"ts": when, "source": origin, "line": text})
                        yield f"id: {when}/{number:012d}\ndata: {data}\n\n"
            if self.closed:
                return
            try:
                await asyncio.wait_for(new_line.wait(), QUIET)
            except asyncio.TimeoutError:
                yield ": waiting\n\n"

    def cursor(self, last_event: str | None, since: str | None, tail: int, source: str | None) -> int:
        """Return the number after which to begin. Last-Event-ID overrides `since`, which overrides `tail`.

        Raises ValueError.
        """
        if last_event is not None:
            when, _, number = last_event.partition("/")
            if number:
                return int(number)
            return self._before(seconds(when), inclusive=True)
        if since is not None:
            return self._before(seconds(since), inclusive=False)
        numbers = [line[0] for line in self.lines if source in (None, line[2])]
        if tail == 0 or not numbers:
            return self._count
        return numbers[-tail:][0] - 1

    def _before(self, moment: float, inclusive: bool) -> int:
        passed = 0
        for number, when, _, _ in self.lines:
            if seconds(when) < moment or (inclusive and seconds(when) == moment):
                passed = number
        return passed

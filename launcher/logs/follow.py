"""Follow a run: read new lines of all ranks and attempts as they are written, until the run has ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from launcher.logs.files import RankFile
from launcher.logs.merged_lines import Source, merge

POLL = 0.15  # seconds between two polls; a line is shown at most this plus one read after it was written
STATS_PER_SECOND = 5000  # limit for runs with so many files that polling all of them takes longer than POLL


class Follower:
    """Holds one Source per known file (an offset and a name, no open file)."""

    def __init__(
        self,
        files: Callable[[int], list[list[RankFile]]],
        source: Callable[[RankFile], Source],
        folding: bool = True,
    ) -> None:
        """`files(n)` lists the files of attempt n and later, attempt by attempt; `source` opens one."""
        self._files = files
        self._source = source
        self._folding = folding
        self._sources: dict[RankFile, Source] = {}
        self._oldest = 0

    def new_lines(self) -> Iterator[tuple[bytes, list[bytes]]]:
        """What was written since the last call, attempt by attempt, merged by time."""
        attempts = self._files(self._oldest)
        for files in attempts:
            changed = []
            for file in files:
                source = self._sources.get(file)
                if source is None:
                    source = self._sources[file] = self._source(file)
                if source.reader.size() != source.reader.offset:  # it has grown, or was truncated
                    changed.append(source)
            yield from merge(changed, self._folding)
        # The previous attempt may still be written to when the next one begins; older ones are complete.
        if len(attempts) > 2:
            self._oldest = attempts[-2][0].attempt if attempts[-2] else self._oldest
            self._sources = {
                file: opened for file, opened in self._sources.items() if file.attempt >= self._oldest
            }

    def lines(self, done: Callable[[], bool]) -> Iterator[tuple[bytes, list[bytes]]]:
        """Poll until `done()` is true. One more poll then yields the rest.

        Each poll ends with an empty list.
        """
        while True:
            last = done()
            yield from self.new_lines()
            yield b"", []
            if last:
                return
            time.sleep(max(POLL, len(self._sources) / STATS_PER_SECOND))

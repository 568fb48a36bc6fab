"""Warn if a rank fetches samples for so long that the ranks that wait for it may time out."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from launcher.spec.verdict import FETCHED, STILL_FETCHING
from launcher.train.rank import Rank

SHARE = 0.5
"Fraction of `train.collective_timeout` after which a rank warns."


class SlowFetch:
    """A thread watches how long this rank has been fetching: the main thread may hang in the user's code."""

    def __init__(self, rank: Rank) -> None:
        self._rank, self._limit = rank, SHARE * rank.job.train.collective_timeout
        self._since: float | None = None
        self._reported: float | None = None
        "The start of the fetch that was reported last."

    def watch(self) -> None:
        """Start the thread, unless this is the only rank."""
        if self._rank.world > 1:
            threading.Thread(target=self._watch, name="slow-fetch", daemon=True).start()

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """Wrap each fetch in this context."""
        self._since = since = time.monotonic()
        try:
            yield
        finally:
            self._since = None
        if self._reported == since:
            print(f"rank {self._rank.number} {FETCHED} after {time.monotonic() - since:.0f} s", flush=True)

    def look(self) -> None:
        """Print a line, once, about a fetch that takes too long."""
        since = self._since
        if since is None or since == self._reported or time.monotonic() - since < self._limit:
            return
        self._reported = since
        print(
            f"rank {self._rank.number} {STILL_FETCHING} after {time.monotonic() - since:.0f} s. The other "
            f"ranks give up after {self._rank.job.train.collective_timeout:g} s (train.collective_timeout)",
            flush=True,
        )

    def _watch(self) -> None:
        while True:
            time.sleep(self._limit / 4)
            self.look()

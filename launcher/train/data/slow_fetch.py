"""Tells that a rank fetches samples for so long that the others, which wait for it, may give up."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from launcher.spec.verdict import FETCHED, STILL_FETCHING
from launcher.train.rank import Rank

SHARE = 0.5
"Part of `train.collective_timeout` after which the rank tells."


class SlowFetch:
    """A thread watches how long this rank has been fetching: the main thread may hang in the user's code."""

    def __init__(self, rank: Rank) -> None:
        self._rank, self._limit = rank, SHARE * rank.job.train.collective_timeout
        self._since: float | None = None
        self._told: float | None = None
        "The start of the fetch that the thread has told of."

    def watch(self) -> None:
        """Start the thread. A single rank keeps nobody waiting."""
        if self._rank.world > 1:
            threading.Thread(target=self._watch, name="slow-fetch", daemon=True).start()

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """Surround each fetch."""
        self._since = since = time.monotonic()
        try:
            yield
        finally:
            self._since = None
        if self._told == since:
            print(f"rank {self._rank.number} {FETCHED} after {time.monotonic() - since:.0f} s", flush=True)

    def look(self) -> None:
        """Tell, once, of a fetch that takes too long."""
        since = self._since
        if since is None or since == self._told or time.monotonic() - since < self._limit:
            return
        self._told = since
        print(
            f"rank {self._rank.number} {STILL_FETCHING} after {time.monotonic() - since:.0f} s. The other "
            f"ranks give up after {self._rank.job.train.collective_timeout:g} s (train.collective_timeout)",
            flush=True,
        )

    def _watch(self) -> None:
        while True:
            time.sleep(self._limit / 4)
            self.look()

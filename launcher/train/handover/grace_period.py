"""Saves the last complete step when the run must stop, before the ranks are killed.

Usually the current step ends in time and the loop writes a checkpoint. If the step would take too long, it is
abandoned: the ranks hand over the step before, and are started once more to write it as a checkpoint.
"""

from __future__ import annotations

import threading
import time

from launcher.rundir.stop import read_stop_request
from launcher.train.handover.restart import BYTES_PER_SECOND, Restart
from launcher.train.rank import Rank

LOOK_SECONDS = 1.0
STARTS = 3
"Start-up times reserved: torchrun and then a rank start before the handover can be written as a checkpoint."
WRITES = 2
"Writes reserved: one into shared memory, one from there to the checkpoint."
MARGIN_SECONDS = 5.0


class GracePeriod:
    """Watches for a stop request on rank 0. Does nothing without `restart`: no handover would be possible."""

    def __init__(self, rank: Rank, restart: Restart | None) -> None:
        self.rank, self.restart = rank, restart
        self._stopped = threading.Event()
        self._began: float | None = None
        "Start of the current step, in seconds since the epoch."
        self._last: float | None = None
        "Seconds between the start of the last step and the start of this one."

    def watch(self) -> None:
        """Start the thread. Call this when the training can begin."""
        if self.restart is not None and self.rank.first:
            start_seconds = time.monotonic() - self.restart.began
            arguments = (self.restart, start_seconds)
            threading.Thread(target=self._watch, args=arguments, name="in-time", daemon=True).start()

    def step_begins(self) -> None:
        now = time.time()
        self._last = now - self._began if self._began is not None else None
        self._began = now

    def stop_watching(self) -> None:
        """Stop the thread: the step has ended, and the loop writes the checkpoint."""
        self._stopped.set()

    def _watch(self, restart: Restart, start_seconds: float) -> None:
        until, latest = None, float("inf")
        while not self._stopped.wait(LOOK_SECONDS):
            deadline = read_stop_request(self.rank.stop_file).killed_at
            if deadline is not None and deadline != until:
                until, latest = deadline, self._latest(restart, start_seconds, deadline)
            if time.time() > latest:
                restart.out_of_time()
                return

    def _latest(self, restart: Restart, start_seconds: float, until: float) -> float:
        assert restart.handover is not None
        writing = restart.handover.bytes() * self.rank.per_node / BYTES_PER_SECOND
        ends = self._began + self._last if self._began is not None and self._last is not None else None
        return given_up_at(until, time.time(), ends, start_seconds, writing)


def given_up_at(
    until: float, now: float, step_ends: float | None, start_seconds: float, write_seconds: float
) -> float:
    """Return the time at which to abandon the current step, if the ranks are killed at `until`.

    All arguments are in seconds; times are since the epoch. `step_ends` assumes the duration of the last
    step; None for the first step. Returns `now` if the step cannot end and be written before `until`.
    Otherwise the step gets at least half of the remaining time.
    """
    if step_ends is not None and step_ends + write_seconds > until:
        return now
    needed = STARTS * start_seconds + WRITES * write_seconds + MARGIN_SECONDS
    return until - min(needed, (until - now) / 2)

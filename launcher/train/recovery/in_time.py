"""The run is to stop, and its last complete step is to be a checkpoint before the ranks are killed.

Most often the step under way ends in time, and the loop writes it. A step that takes longer than what is left
is given up: the ranks hand over the one before, and are started once more to write that.
"""

from __future__ import annotations

import threading
import time

from launcher.rundir.stop import read_stop_request
from launcher.train.rank import Rank
from launcher.train.recovery.restart import BYTES_PER_SECOND, Restart

LOOK_SECONDS = 1.0
STARTS = 3
"Before what was handed over can be written, torchrun starts and then a rank, each as long as this one took."
WRITES = 2
"Into shared memory, and from there."
MARGIN_SECONDS = 5.0


class InTime:
    """On rank 0, which alone looks for the request. Without `restart` nobody could take up a handover."""

    def __init__(self, rank: Rank, restart: Restart | None) -> None:
        self.rank, self.restart = rank, restart
        self._leaves = threading.Event()
        self._began: float | None = None
        "The step under way, in seconds since the epoch."
        self._last: float | None = None
        "Seconds from the beginning of the last step to that of this one."

    def watch(self) -> None:
        """Call it when the training can begin."""
        if self.restart is not None and self.rank.first:
            start_seconds = time.monotonic() - self.restart.began
            arguments = (self.restart, start_seconds)
            threading.Thread(target=self._watch, args=arguments, name="in-time", daemon=True).start()

    def step_begins(self) -> None:
        now = time.time()
        self._last = now - self._began if self._began is not None else None
        self._began = now

    def leaves_by_itself(self) -> None:
        """The step has ended, and the loop writes the checkpoint."""
        self._leaves.set()

    def _watch(self, restart: Restart, start_seconds: float) -> None:
        until, latest = None, float("inf")
        while not self._leaves.wait(LOOK_SECONDS):
            told = read_stop_request(self.rank.stop_file).killed_at
            if told is not None and told != until:
                until, latest = told, self._latest(restart, start_seconds, told)
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
    """When the step under way is given up, if the ranks are killed at `until`. All in seconds, times since
    the epoch. `step_ends`: if it takes as long as the last one; None for the first one.

    At once, if it cannot end and be written before; else it has half of what is left in any case.
    """
    if step_ends is not None and step_ends + write_seconds > until:
        return now
    needed = STARTS * start_seconds + WRITES * write_seconds + MARGIN_SECONDS
    return until - min(needed, (until - now) / 2)

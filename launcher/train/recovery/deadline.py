"""Time limit for the ranks to reach the next agreement after one of them failed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

SECONDS, STEPS = 10.0, 2
"The limit is SECONDS plus STEPS times the last step: a rank that is behind has less than one step to go."


class Deadline:
    """A timer on its own thread: the main thread may be blocked in a collective that never ends.

    `timeout` is that of a collective, in seconds. The limit is at most half of it, so that the other ranks do
    not time out first.
    """

    def __init__(self, timeout: float) -> None:
        self._limit = timeout / 2
        self._step, self._began = SECONDS, 0.0
        self._timer: threading.Timer | None = None

    def step_begins(self) -> None:
        self._began = time.monotonic()

    def step_done(self) -> None:
        self._step = time.monotonic() - self._began

    def set(self, on_timeout: Callable[[], object]) -> None:
        """Start the timer. Its thread calls `on_timeout` unless `lift` is called in time."""
        self.lift()
        self._timer = threading.Timer(min(self._limit, SECONDS + STEPS * self._step), on_timeout)
        self._timer.daemon = True
        self._timer.start()

    def lift(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

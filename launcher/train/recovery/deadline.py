"""How long a rank that ran out of memory waits until all ranks have met again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

SECONDS, STEPS = 10.0, 2
"A rank that is behind has less than a step to go: so many times the last one, and the seconds."


class Deadline:
    """It comes on a thread of its own: the main thread may be blocked in a collective that never ends.

    `timeout`: of a collective, in seconds. The others must not give up before.
    """

    def __init__(self, timeout: float) -> None:
        self._most = timeout / 2
        self._step, self._began = SECONDS, 0.0
        self._timer: threading.Timer | None = None

    def step_begins(self) -> None:
        self._began = time.monotonic()

    def step_done(self) -> None:
        self._step = time.monotonic() - self._began

    def set(self, missed: Callable[[], object]) -> None:
        """`missed` is called on the thread unless `lift` is called in time."""
        self.lift()
        self._timer = threading.Timer(min(self._most, SECONDS + STEPS * self._step), missed)
        self._timer.daemon = True
        self._timer.start()

    def lift(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

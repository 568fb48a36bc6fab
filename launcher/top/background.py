"""A background thread for slow work, such as queries to schedulers. It handles one request at a time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

Work = Callable[[], None]


class Background:
    """Runs work in one thread, because schedulers keep state between calls and are not thread-safe."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self._leaving = False
        self._unfinished = 0
        "Number of the user's requests that are not yet done."
        self._changed = threading.Condition()
        # A daemon thread, because a host that does not answer must not delay the program's exit.
        threading.Thread(target=self._serve, daemon=True, name="top").start()

    def look(self, work: Work) -> None:
        """Queue work that may be dropped when the program ends."""
        self._waiting.put(lambda: None if self._leaving else work())

    def request(self, work: Work) -> None:
        """Queue work that the user has requested. `leave` waits for it."""
        with self._changed:
            self._unfinished += 1

        def done() -> None:
            try:
                work()
            finally:
                with self._changed:
                    self._unfinished -= 1
                    self._changed.notify_all()

        self._waiting.put(done)

    def leave(self) -> None:
        """Wait until all requests are done."""
        self._leaving = True
        with self._changed:
            self._changed.wait_for(lambda: self._unfinished == 0)

    def _serve(self) -> None:
        while True:
            self._waiting.get()()

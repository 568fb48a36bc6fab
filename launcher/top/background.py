"""One thread for everything that may take long, such as questions to schedulers. One request at a time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

Work = Callable[[], None]


class Background:
    """Schedulers keep state between calls, so no two threads may use them at once."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self._leaving = False
        self._must = 0
        "Number of requests of the user that are not done yet."
        self._changed = threading.Condition()
        # A daemon, because a host that does not answer must not delay the end of the program.
        threading.Thread(target=self._serve, daemon=True, name="top").start()

    def look(self, work: Work) -> None:
        """Do something that is not needed any more once the program ends."""
        self._waiting.put(lambda: None if self._leaving else work())

    def request(self, work: Work) -> None:
        """Do something that the user has asked for. `leave` waits for it."""
        with self._changed:
            self._must += 1

        def done() -> None:
            try:
                work()
            finally:
                with self._changed:
                    self._must -= 1
                    self._changed.notify_all()

        self._waiting.put(done)

    def leave(self) -> None:
        """Wait until all requests are done."""
        self._leaving = True
        with self._changed:
            self._changed.wait_for(lambda: self._must == 0)

    def _serve(self) -> None:
        while True:
            self._waiting.get()()

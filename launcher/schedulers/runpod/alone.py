"""One process at a time rents for a run: two pods of it would both cost money."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator

from launcher.rundir.layout import RunDir
from launcher.schedulers.base import SchedulerError


class BusyError(SchedulerError):
    """Another process is at it."""


@contextlib.contextmanager
def renting(run: RunDir) -> Iterator[None]:
    """Ask for the run's state within: it may have got a pod since. Raises BusyError."""
    with open(run.path / ".rent.lock", "w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(
                f"another process of launcher is renting a pod for {run.id}: "
                f"`launcher status {run.id}` shows what came of it"
            ) from None
        yield

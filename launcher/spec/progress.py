"""Announce work that takes long to a listener, which shows it. Without a listener, nothing is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeAlias

Advance: TypeAlias = Callable[[int], None]
"Takes the number of bytes processed since the last call."
Listener: TypeAlias = Callable[[str, int | None], AbstractContextManager[Advance]]

_listeners: list[Listener] = []


@contextmanager
def working(what: str, total: int | None = None) -> Iterator[Advance]:
    """Announce work that may take seconds, such as `sending the job's code`. `total` is its size in bytes.

    Do not ask the user anything inside: the listener's output may get in the way.
    """
    if not _listeners:
        yield lambda _: None
        return
    with _listeners[-1](what, total) as advance:
        yield advance


def listen(listener: Listener) -> None:
    """Let `listener` show the work of this process from now on."""
    _listeners[:] = [listener]


def be_silent() -> None:
    """Stop showing work, because something else draws on the terminal."""
    _listeners.clear()

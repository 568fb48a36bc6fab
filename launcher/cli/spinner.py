"""Show work that takes longer than a second: an animated line on a terminal, otherwise one plain line."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from launcher.cli.output import harmless_text
from launcher.spec.progress import Advance
from launcher.spec.quantities import format_bytes

if TYPE_CHECKING:
    from rich.status import Status

PATIENCE = 1.0
"Seconds before anything is shown."


class _Work:
    """A piece of work. Pieces can be nested; the innermost is shown."""

    def __init__(self, what: str, total: int | None) -> None:
        self._what, self._total, self._done = what, total, 0

    def advance(self, count: int) -> None:
        self._done += count

    def __str__(self) -> str:
        if not self._total:
            return self._what
        return f"{self._what}: {format_bytes(self._done)} of {format_bytes(self._total)}"


class LongWork:
    """A listener of `launcher.spec.progress`."""

    def __init__(self, *, plain: bool = True) -> None:
        """`plain`: also print a line if stderr is not a terminal."""
        self._plain = plain
        self._works: list[_Work] = []
        self._printed: set[str] = set()
        self._status: Status | None = None
        self._lock = threading.RLock()

    @contextmanager
    def __call__(self, what: str, total: int | None) -> Iterator[Advance]:
        work = _Work(what, total)
        timer = threading.Timer(PATIENCE, self._show, [work])
        timer.daemon = True
        with self._lock:
            self._works.append(work)
            self._draw()
        timer.start()

        def advance(count: int) -> None:
            work.advance(count)
            self._draw()

        try:
            yield advance
        finally:
            timer.cancel()
            with self._lock:
                self._works.remove(work)
                self._draw()

    def _show(self, work: _Work) -> None:
        with self._lock:
            if work not in self._works:
                return
            if not sys.stderr.isatty():
                line = harmless_text(str(work))
                if self._plain and line not in self._printed:
                    self._printed.add(line)
                    print(f"launcher: {line}", file=sys.stderr, flush=True)
                return
            if self._status is None:
                from rich.console import Console

                self._status = Console(file=sys.__stderr__).status("")
                self._status.start()
            self._draw()

    def _draw(self) -> None:
        """Show the innermost work, or remove the line when all work is done."""
        with self._lock:
            if self._status is None:
                return
            if self._works:
                from rich.text import Text

                self._status.update(Text(harmless_text(str(self._works[-1]))))
            else:
                self._status.stop()
                self._status = None

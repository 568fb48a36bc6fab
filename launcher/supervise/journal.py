"""Write the supervisor's records. A full disk must not lose the verdict or end the supervisor."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launcher.rundir.files import replace_json
from launcher.rundir.layout import RunDir
from launcher.rundir.time import now
from launcher.spec.events import Event

RESERVE_BYTES = 256 * 1024
"Room for the verdicts, states and events of a whole run."


class Journal:
    """Writes the events, state and verdicts of one run. Never raises OSError.

    It keeps a reserve file and deletes it when the disk is full, so that the last records still fit.
    """

    def __init__(self, run: RunDir, node: int = 0) -> None:
        self.run = run
        self._reserve = run.path / f".reserve-{node:02d}"
        with contextlib.suppress(OSError):
            self._reserve.write_bytes(b"\0" * RESERVE_BYTES)

    def event(self, event: Event) -> None:
        self._write(lambda: self.run.append(event), f"event {event.kind}")

    def state(self, state: str, **fields: Any) -> None:
        value = {"state": state, "time": now(), **fields}
        self._write(lambda: replace_json(self.run.state, value), f"state {state}")

    def json(self, path: Path, value: Any) -> None:
        def write() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_json(path, value)

        self._write(write, path.name)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._reserve.unlink(missing_ok=True)

    def _write(self, write: Callable[[], None], what: str) -> None:
        try:
            write()
        except OSError:
            self.close()
            try:
                write()
            except OSError as error:
                with contextlib.suppress(OSError):
                    print(f"[launcher] cannot write {what}: {error}", file=sys.stderr, flush=True)

"""Remove the doctor's temporary files, even if it is killed.

A run that is cancelled before its ranks start gets SIGKILL. A separate process therefore keeps the paths and
removes them when the doctor has ended.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import NoReturn

from launcher.spec.signals import STOP_SIGNALS

REMOVE_SECONDS = 3.0
"How long to keep removing files. The ranks of a test, which die with the doctor, may still write at first."


class Leftovers:
    """Paths to remove at the end. Use it as a context manager, before the process starts threads."""

    def __enter__(self) -> Leftovers:
        read_end, self._write_end = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            os.close(self._write_end)
            _remove_at_end(read_end)
        os.close(read_end)
        os.setpgid(self._pid, self._pid)  # leave the doctor's process group, which gets SIGKILL
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._write_end)
        os.waitpid(self._pid, 0)

    def add(self, path: str | Path) -> None:
        """Remove this file or folder at the end, if it still exists then."""
        os.write(self._write_end, f"{path}\0".encode())


def _remove_at_end(read_end: int) -> NoReturn:
    """Read paths until the doctor has ended, and remove them."""
    try:
        for signum in STOP_SIGNALS:
            signal.signal(signum, signal.SIG_IGN)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):  # bash waits until its pipe is closed everywhere
            os.dup2(null, stream)
        with os.fdopen(read_end, "rb") as file:
            paths = file.read().split(b"\0")
        deadline = time.monotonic() + REMOVE_SECONDS
        while (remaining := [path for path in paths if path and os.path.lexists(path)]) and (
            time.monotonic() < deadline
        ):
            for path in remaining:
                shutil.rmtree(path, ignore_errors=True)
                Path(os.fsdecode(path)).unlink(missing_ok=True)
            time.sleep(0.02)
    finally:
        os._exit(0)

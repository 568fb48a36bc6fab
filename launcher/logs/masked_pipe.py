"""A pipe that appends what is written to it to a file, with secrets masked."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Iterable
from pathlib import Path

from launcher.rundir.secret_masking import Masker

_CHUNK = 65536  # bytes per read: the capacity of a pipe
_HELD = 2**20  # maximum capacity of a pipe in bytes (pipe(7)): what is still read when it is closed
_LOOK = 0.2  # seconds between two checks whether to stop while another process holds the pipe


class MaskedPipe:
    """Takes the output of a program that writes to a file descriptor: bash, torchrun, the dynamic linker.

        pipe = MaskedPipe(log, secrets)
        process = subprocess.Popen(argv, stdout=pipe.end, stderr=pipe.end)
        pipe.start()
        process.wait()
        pipe.close()

    Output that a full disk refuses is lost; the program continues.
    """

    def __init__(self, path: Path, secrets: Iterable[bytes]) -> None:
        """Open the file. Raises OSError if that fails."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._masker = Masker(secrets)
        self._source, self.end = os.pipe()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._copy, daemon=True)

    def start(self) -> None:
        """Start copying. Call it after the program has started, which then holds the only writing end."""
        os.close(self.end)
        self._thread.start()

    def close(self) -> None:
        """Wait until all output so far is in the file, even if another process still holds the pipe."""
        if self._thread.ident is None:
            os.close(self.end)
        else:
            self._stop.set()
            self._thread.join()
        os.close(self._source)
        os.close(self._file)

    def _copy(self) -> None:
        poll = select.poll()
        poll.register(self._source, select.POLLIN)
        left = _HELD
        while left > 0:
            stopping = self._stop.is_set()  # before polling, so that output from before `close` is read
            if poll.poll(0 if stopping else _LOOK * 1000):
                chunk = os.read(self._source, _CHUNK)
                if not chunk:
                    break
                self._write(self._masker.feed(chunk))
                left -= len(chunk) if stopping else 0
            elif stopping:
                break
        if left > 0:  # otherwise there was more, and what is held back may be half a secret
            self._write(self._masker.flush())

    def _write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            while data:
                data = data[os.write(self._file, data) :]

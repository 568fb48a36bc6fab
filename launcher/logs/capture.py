"""Capture the output of one rank as stamped lines in two files.

This runs once per rank, next to the training, so it uses only the standard library, and a line costs no more
than `bytes.replace`. One stamp is taken per chunk that arrives (some milliseconds of output at most).
"""

from __future__ import annotations

import os
import re
import select
import subprocess
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal

from launcher.diagnosis.clue import Clue, Kind
from launcher.diagnosis.collector import Collector
from launcher.diagnosis.users_patterns import STRIKES
from launcher.logs.lines import LineAssembler
from launcher.rundir.secret_masking import Masker
from launcher.rundir.time import now as stamp_now

Stream = Literal["out", "err"]
LAST_LINES = 20
RETRY = 1.0  # seconds between two attempts to write to a full disk
_CHUNK = 65536  # bytes per read: the capacity of a pipe
_SMALL = 4096  # a smaller read is followed by a pause, to limit the wake-ups for a line-by-line writer
_PAUSE = 0.002
_CHECK = 0.5  # seconds between two checks whether the child has ended while a grandchild holds its pipes
_SILENCE = 0.1  # seconds without output after which processes outside the child's group are not waited for
_FRAMES = re.compile(rb"^frame #\d+: .*\n", re.MULTILINE)
"A C++ stack as torch prints it. It would fill `last_lines` and hide what came before it."
_SHOWN = 2000  # bytes of a line kept for `last_lines`


class StampedFile:
    """Appends stamped lines to one file. If it was moved away or deleted, a new one is started.

    If the disk is full, lines are lost and counted, and nothing is raised.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = 0  # in the file
        self.lost = 0  # in all
        self._unreported = 0
        self._why = ""
        self._retry_at = 0.0
        self._last_stamp = ""
        self._descriptor = -1

    def write(self, lines: bytes, now: float, *, force: bool = False) -> None:
        """`lines` end in newlines. `now` is monotonic; `force` retries a full disk ahead of time."""
        if self._unreported and now < self._retry_at and not force:
            return self._lose(lines)
        # The clock may be set back, but the stamps of a file must not decrease.
        self._last_stamp = max(self._last_stamp, stamp_now())
        start = self._last_stamp.encode() + b" "
        stamped = start + lines.replace(b"\n", b"\n" + start)[: -len(start)] if lines else b""
        try:
            if self._descriptor < 0 or self._moved():
                self._open()
            if self._unreported:
                notice = start + f"[launcher] {self._unreported} lines lost: {self._why}\n".encode()
                if self._append(notice) < len(notice):
                    raise OSError(self._why)
                self._unreported = 0
                self.lines += 1
            written = self._append(stamped)
            self.lines += lines.count(b"\n") if written == len(stamped) else stamped.count(b"\n", 0, written)
        except OSError as error:
            self._why = error.strerror or str(error)
            self._retry_at = now + RETRY
            return self._lose(lines)
        if written < len(stamped):
            self._lose(stamped[written:])
            self._retry_at = now + RETRY
        return None

    def retry(self, now: float) -> None:
        """Report lost lines once there is space again, even if nothing more is written."""
        if self._unreported and now >= self._retry_at:
            self.write(b"", now)

    def close(self, now: float) -> None:
        if self._unreported:
            self.write(b"", now, force=True)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _moved(self) -> bool:
        """Return whether the file is no longer at its path, although its folder still is."""
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(self._descriptor))
        except OSError:
            return self.path.parent.is_dir()

    def _open(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor, self.lines = -1, 0
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        descriptor = os.open(self.path, flags, 0o644)
        self._descriptor = descriptor
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            os.write(descriptor, b"\n")  # an earlier writer died within a line

    def _append(self, data: bytes) -> int:
        """Write complete lines only, and return the number of bytes written.

        Raises OSError if none could be.
        """
        done = 0
        while done < len(data):
            try:
                done += os.write(self._descriptor, data[done:] if done else data)
            except OSError as error:
                self._why = error.strerror or str(error)
                if not done:
                    raise
                torn = done - (data.rfind(b"\n", 0, done) + 1)
                if torn:
                    os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - torn)
                return done - torn
        return done

    def _lose(self, lines: bytes) -> None:
        count = lines.count(b"\n")
        self.lost += count
        self._unreported += count


class _StreamCapture:
    """One stream: masks, assembles and stamps lines, and remembers the last and the decisive ones."""

    def __init__(self, path: Path, secrets: list[bytes], collector: Collector) -> None:
        self.file = StampedFile(path)
        self._name, self._collector = path.suffix[1:], collector
        self.last: deque[bytes] = deque(maxlen=LAST_LINES)
        self._masker = Masker(secrets)
        self._lines = LineAssembler()

    def feed(self, chunk: bytes, now: float) -> None:
        self._write(self._lines.feed(self._masker.feed(chunk), now), now)

    def tick(self, now: float) -> None:
        self._write(self._lines.expire(now), now)
        self.file.retry(now)

    def finish(self, now: float) -> None:
        """Write the rest, at the end of the stream or when it is no longer waited for."""
        self._write(self._lines.feed(self._masker.flush(), now), now)
        self._write(self._lines.flush(now), now)

    def line(self, text: bytes, now: float) -> None:
        """Write one of launcher's own lines, without mixing it into an unfinished line."""
        self._write(self._masker.whole(text.replace(b"\n", b" ")) + b"\n", now)

    def deadline(self) -> float | None:
        return self._lines.deadline()

    def _write(self, lines: bytes, now: float) -> None:
        if lines:
            self.file.write(lines, now)
            first = self.file.lines - lines.count(b"\n") + 1  # a notice of lost lines may precede them
            self._collector.feed(self._name, lines, max(1, first), time.time())
        if b"frame #" in lines:
            lines = _FRAMES.sub(b"", lines)
        if lines:
            recent = lines[:-1].rsplit(b"\n", LAST_LINES)[-LAST_LINES:]
            self.last.extend(line[:_SHOWN] for line in recent)


class RankCapture:
    """Writes a child's stdout and stderr to two files, each line as `<27-char UTC stamp> <bytes>\\n`.

        with RankCapture(attempt.rank_log(0, 3, "out"), attempt.rank_log(0, 3, "err"), secrets) as capture:
            child = subprocess.Popen(argv, stdout=PIPE, stderr=PIPE, bufsize=0)
            code = capture.pump(child)

    Stamps never decrease within a file. Text without a newline is logged after a second of silence. Of a
    progress bar, one state per second and the last one are logged. An endless line is logged in pieces of
    64 KiB. `secrets` (raw bytes, possibly of several lines) become `***`. No method raises OSError: lines
    that a full disk refuses are counted, and reported in the file as `[launcher] N lines lost: <reason>`
    once there is space again. `patterns` are the job's and the cluster's expressions for failures, each with
    its kind.
    """

    def __init__(
        self,
        out_path: Path,
        err_path: Path,
        secrets: Iterable[bytes] = (),
        patterns: Sequence[tuple[str, Kind]] = (),
    ) -> None:
        secrets = list(secrets)
        self._collector = Collector(patterns)
        self._streams = {
            "out": _StreamCapture(out_path, secrets, self._collector),
            "err": _StreamCapture(err_path, secrets, self._collector),
        }
        for stream in self._streams.values():
            stream.file.write(b"", time.monotonic())  # an empty file: started, nothing printed yet

    def pump(self, child: subprocess.Popen[bytes], grace: float = 2.0) -> int:
        """Block until the child has ended and its output is written.

        Return its exit code (negative: a signal).

        `child` has pipes as stdout and stderr. They are read to the end and closed. If a process of the
        child's group still holds them, such as a `tee`, reading stops `grace` seconds after the child ended.
        If only other processes hold them, such as a daemon, reading stops as soon as they print nothing. The
        caller's signal handlers run meanwhile.
        """
        assert child.stdout is not None and child.stderr is not None, "start the child with pipes"
        open_pipes = {
            child.stdout.fileno(): self._streams["out"],
            child.stderr.fileno(): self._streams["err"],
        }
        poll = select.poll()
        for descriptor in open_pipes:
            os.set_blocking(descriptor, False)
            poll.register(descriptor, select.POLLIN)
        ended_at: float | None = None
        while open_pipes:
            small = True
            ready = poll.poll(self._wait_seconds(_CHECK if ended_at is None else _SILENCE) * 1000)
            for descriptor, _ in ready:
                chunk = _read(descriptor)
                if chunk is None:
                    continue
                if not chunk:
                    poll.unregister(descriptor)
                    open_pipes.pop(descriptor).finish(time.monotonic())
                    continue
                open_pipes[descriptor].feed(chunk, time.monotonic())
                small = small and len(chunk) < _SMALL
            now = time.monotonic()
            for stream in self._streams.values():
                stream.tick(now)
            if ended_at is None and child.poll() is not None:
                ended_at = now
            elif ended_at is not None and (now >= ended_at + grace or not (ready or _group_lives(child.pid))):
                break
            if small and open_pipes and ended_at is None:
                time.sleep(_PAUSE)
        for stream in open_pipes.values():
            stream.finish(time.monotonic())
        for expression in self._collector.given_up:
            self.note(f"failures: {expression!r} took too long on {STRIKES} lines and is no longer searched")
        child.stdout.close()
        child.stderr.close()
        return child.wait()

    def note(self, text: str) -> None:
        """Log `[launcher] text` in the err file."""
        self._streams["err"].line(b"[launcher] " + text.encode(errors="replace"), time.monotonic())

    @property
    def clues(self) -> list[Clue]:
        """The decisive lines of both streams."""
        return self._collector.clues()

    @property
    def last_lines(self) -> list[str]:
        """At most 20 lines: the last of stderr, after the last of stdout if there is room.

        stderr comes last because Python flushes a buffered stdout after it has printed the traceback.
        """
        err = self.tail("err")
        room = LAST_LINES - len(err)
        return (self.tail("out")[-room:] if room else []) + err

    def tail(self, stream: Stream) -> list[str]:
        """The last 20 lines of one stream, each truncated to 2,000 bytes."""
        return [line.decode(errors="replace") for line in self._streams[stream].last]

    @property
    def lost(self) -> int:
        """Number of lines that could not be written."""
        return sum(stream.file.lost for stream in self._streams.values())

    def close(self) -> None:
        for stream in self._streams.values():
            stream.file.close(time.monotonic())

    def __enter__(self) -> RankCapture:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wait_seconds(self, most: float) -> float:
        """Seconds until the next action is due, at most `most`."""
        deadlines = [stream.deadline() for stream in self._streams.values()]
        now = time.monotonic()
        due = min((deadline for deadline in deadlines if deadline is not None), default=now + most)
        return min(max(0.0, due - now) + 0.001, most)


def _group_lives(leader: int) -> bool:
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it has processes of another user
        pass
    return True


def _read(descriptor: int) -> bytes | None:
    """The available bytes; empty at the end; None if there are none yet."""
    try:
        return os.read(descriptor, _CHUNK)
    except BlockingIOError:
        return None
    except OSError:
        return b""

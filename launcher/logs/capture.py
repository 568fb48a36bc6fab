"""Capture of one rank: what a child process writes becomes stamped lines in two files.

Runs once per rank, beside the training: standard library only, and the cost per line is that of
`bytes.replace`. One stamp is taken per chunk that arrives (some milliseconds of output at most).
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
from launcher.diagnosis.own_words import STRIKES
from launcher.logs.lines import LineAssembler
from launcher.logs.mask import Masker, secrets_of
from launcher.rundir.time import now as stamp_now

__all__ = ["RankCapture", "secrets_of"]

Stream = Literal["out", "err"]
LAST_LINES = 20
RETRY = 1.0  # seconds between two tries on a full disk
_CHUNK = 65536  # bytes per read: what a pipe holds
_SMALL = 4096  # a read below this is followed by a pause, so that a line-by-line writer costs few wake-ups
_PAUSE = 0.002
_LOOK = 0.5  # seconds between two looks whether the child ended although a grandchild holds its pipes
_FRAMES = re.compile(rb"^frame #\d+: .*\n", re.MULTILINE)
"A C++ stack as torch prints it: longer than `last_lines`, which would end with what came before it."
_SHOWN = 2000  # bytes of a line kept for `last_lines`


class StampedFile:
    """Appends stamped lines to one file. A full disk loses lines, counts them, and raises nothing."""

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
        """`lines` end in newlines. `now` is monotonic; `force` tries a full disk before its time."""
        if self._unreported and now < self._retry_at and not force:
            return self._lose(lines)
        # The clock may be set back; the stamps of a file are not.
        self._last_stamp = max(self._last_stamp, stamp_now())
        start = self._last_stamp.encode() + b" "
        stamped = start + lines.replace(b"\n", b"\n" + start)[: -len(start)] if lines else b""
        try:
            if self._descriptor < 0:
                self._open()
            if self._unreported:
                notice = f"[launcher] {self._unreported} lines lost: {self._why}\n"
                self._append(start + notice.encode())
                self._unreported = 0
                self.lines += 1
            written = self._append_some(stamped)
            self.lines += lines.count(b"\n") if written == len(stamped) else stamped.count(b"\n", 0, written)
        except OSError as error:
            self._failed(error, now)
            return self._lose(lines)
        if written < len(stamped):
            self._lose(stamped[written:])
            self._retry_at = now + RETRY
        return None

    def retry(self, now: float) -> None:
        """Tell of lost lines once there is space again, also when nothing more is written."""
        if self._unreported and now >= self._retry_at:
            self.write(b"", now)

    def close(self, now: float) -> None:
        if self._unreported:
            self.write(b"", now, force=True)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        descriptor = os.open(self.path, flags, 0o644)
        self._descriptor = descriptor
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            os.write(descriptor, b"\n")  # a writer before us died within a line

    def _append(self, data: bytes) -> None:
        if self._append_some(data) < len(data):
            raise OSError(self._why)

    def _append_some(self, data: bytes) -> int:
        """Bytes of `data` written, whole lines only. Raises OSError when nothing could be written."""
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

    def _failed(self, error: OSError, now: float) -> None:
        self._why = error.strerror or str(error)
        self._retry_at = now + RETRY

    def _lose(self, lines: bytes) -> None:
        count = lines.count(b"\n")
        self.lost += count
        self._unreported += count


class _StreamCapture:
    """One stream: mask, assemble, stamp, remember the last lines and the decisive ones."""

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
        """The end of the stream, or of the patience with it."""
        self._write(self._lines.feed(self._masker.flush(), now), now)
        self._write(self._lines.flush(now), now)

    def line(self, text: bytes, now: float) -> None:
        """A line of our own, not mixed into an unfinished one."""
        self._write(self._masker.whole(text.replace(b"\n", b" ")) + b"\n", now)

    def deadline(self) -> float | None:
        return self._lines.deadline()

    def _write(self, lines: bytes, now: float) -> None:
        if lines:
            self.file.write(lines, now)
            first = self.file.lines - lines.count(b"\n") + 1  # a notice of lost lines may stand before them
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

    Stamps never decrease within a file. A text without a newline is logged after a second of silence, of
    a progress bar one state per second and the last one, an endless line in pieces of 64 KiB. `secrets`
    (raw bytes, also of several lines) become `***`. No method raises OSError: what a full disk refuses is
    counted, and reported in the file by `[launcher] N lines lost: <reason>` when there is space again.
    `patterns`: expressions of the job and of the cluster that tell of a failure, each with its kind.
    """

    def __init__(
        self,
        out_path: Path,
        err_path: Path,
        secrets: Iterable[bytes] = (),
        patterns: Sequence[tuple[str, Kind]] = (),
    ) -> None:
        known = list(secrets)
        self._collector = Collector(patterns)
        self._streams = {
            "out": _StreamCapture(out_path, known, self._collector),
            "err": _StreamCapture(err_path, known, self._collector),
        }
        for stream in self._streams.values():
            stream.file.write(b"", time.monotonic())  # an empty file says: started, nothing printed yet

    def pump(self, child: subprocess.Popen[bytes], grace: float = 2.0) -> int:
        """Block until the child ended and its output is written; returns its code (negative: a signal).

        `child` has pipes as stdout and stderr; they are read to the end, or until `grace` seconds after
        the child ended when another process still holds them, and closed. Signal handlers of the caller
        run meanwhile.
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
            for descriptor, _ in poll.poll(self._patience() * 1000):
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
            if ended_at is not None and now >= ended_at + grace:
                break
            if small and open_pipes and ended_at is None:
                time.sleep(_PAUSE)
        for stream in open_pipes.values():
            stream.finish(time.monotonic())
        for expression in self._collector.given_up:
            self.note(f"failures: {expression!r} took too long on {STRIKES} lines and was searched no more")
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
        """At most 20 lines: the last of stderr, before them the last of stdout where room is left.

        Stderr goes last because Python flushes a buffered stdout after the traceback was printed.
        """
        err = self.tail("err")
        room = LAST_LINES - len(err)
        return (self.tail("out")[-room:] if room else []) + err

    def tail(self, stream: Stream) -> list[str]:
        """The last 20 lines of one stream, each cut at 2,000 bytes."""
        return [line.decode(errors="replace") for line in self._streams[stream].last]

    @property
    def lost(self) -> int:
        """Lines that no disk took."""
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

    def _patience(self) -> float:
        """Seconds that may pass before something is due."""
        deadlines = [stream.deadline() for stream in self._streams.values()]
        now = time.monotonic()
        due = min((deadline for deadline in deadlines if deadline is not None), default=now + _LOOK)
        return min(max(0.0, due - now) + 0.001, _LOOK)


def _read(descriptor: int) -> bytes | None:
    """What is there; empty at the end; None when nothing is there yet."""
    try:
        return os.read(descriptor, _CHUNK)
    except BlockingIOError:
        return None
    except OSError:
        return b""

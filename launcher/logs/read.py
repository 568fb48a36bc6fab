"""Read a growing file by offset: complete lines, each once. No file stays open between two reads."""

from __future__ import annotations

import os
from pathlib import Path

from launcher.rundir.files import open_regular
from launcher.rundir.time import STAMP_LENGTH

# Bytes. A longer line, which our capture never writes, is split into lines of this length.
LONGEST_LINE = 4 * 2**20
TEXT_START = STAMP_LENGTH + 1
# Bytes at the beginning of a file that distinguish it from another one of the same name: a stamp, and some
# text.
_HEAD = 64
# Bytes at the end of a file that are searched for its last line: two of the longest that our capture writes.
_LAST = 2**17


class OffsetReader:
    """Reads what was appended since the last call, up to a limit, in complete lines."""

    __slots__ = ("_head", "offset", "path")

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = str(path)
        self.offset = offset
        self._head = b""

    def size(self) -> int:
        """Size of the file in bytes; 0 if it does not exist."""
        try:
            # Following 1,024 ranks calls this 13,000 times a second; Path.stat would double the cost.
            return os.stat(self.path).st_size
        except FileNotFoundError:
            return 0

    def read(self, limit: int) -> bytes:
        """At most `limit` bytes of complete lines (a single longer line is returned whole), or nothing.

        An unfinished line at the end of the file is left for a later call. A file that was truncated, or that
        replaces one that was moved away, is read from its start. Raises OSError, but a missing file is empty.
        """
        try:
            file = open_regular(self.path)
        except FileNotFoundError:
            return b""
        with file:
            head = os.pread(file.fileno(), _HEAD, 0)
            if not head.startswith(self._head) or os.fstat(file.fileno()).st_size < self.offset:
                self.offset = 0
            self._head = head
            while True:
                data = os.pread(file.fileno(), limit, self.offset)
                end = data.rfind(b"\n") + 1
                if end:
                    self.offset += end
                    return data[:end]
                if len(data) < limit:
                    return b""
                if limit >= LONGEST_LINE:
                    self.offset += len(data)
                    return data + b"\n"
                limit *= 2


def offset_of(path: Path, stamp: bytes) -> int:
    """Offset of the first line at or after `stamp`, found by a binary search."""
    try:
        with open_regular(path) as file:
            low, high = 0, os.fstat(file.fileno()).st_size
            while low < high:
                middle = (low + high) // 2
                file.seek(middle)
                if middle:
                    file.seek(middle - 1)
                    file.readline()  # to the beginning of the next line
                start = file.tell()
                line = file.readline(TEXT_START) if start < high else b""
                if not line or line[:STAMP_LENGTH] >= stamp:
                    high = middle
                else:
                    low = start + len(line)
                    if not line.endswith(b"\n"):
                        low += len(file.readline())
            return low
    except FileNotFoundError:
        return 0


def offset_near_end(path: Path, most: int) -> int:
    """Offset of the first whole line in the last `most` bytes."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size <= most:
                return 0
            file.seek(size - most - 1)
            file.readline()
            return file.tell()
    except FileNotFoundError:
        return 0


def last_stamp(path: Path) -> str | None:
    """The time stamp of the last complete line; None if there is none. Raises OSError."""
    lines = OffsetReader(path, offset_near_end(path, _LAST)).read(_LAST)
    start = lines.rfind(b"\n", 0, -1) + 1
    return lines[start : start + STAMP_LENGTH].decode(errors="replace") if lines else None

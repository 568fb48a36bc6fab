"""Bytes as they arrive -> whole lines as they are logged. No files and no clock in here."""

from __future__ import annotations

LONGEST_LINE = 65536  # bytes; an endless line is cut into pieces of this length
QUIET = 1.0  # seconds after which text without a newline (a prompt) is logged as a line
PROGRESS = 1.0  # seconds between two logged states of a progress bar


class LineAssembler:
    """Turns one stream into lines.

    A text that a carriage return replaces (a progress bar) is left out, except that the latest one is
    logged once a second. `now` is any clock in seconds that does not go back.
    """

    def __init__(self) -> None:
        self._partial = b""  # the unfinished line
        self._logged = False  # its beginning was logged already, so that an empty rest is no line
        self._arrived = 0.0
        self._next_progress = float("-inf")

    def feed(self, chunk: bytes, now: float) -> bytes:
        """Whole lines, each ending in a newline, or nothing."""
        if not chunk:
            return b""
        self._arrived = now
        data = self._partial + chunk if self._partial else chunk
        end = data.rfind(b"\n") + 1
        lines, self._partial = (data[:end], data[end:]) if end else (b"", data)
        if lines:
            lines = self._finish(lines)
        if len(self._partial) >= LONGEST_LINE or b"\r" in self._partial:
            lines += self._shorten(now)
        return lines

    def deadline(self) -> float | None:
        """When `expire` has something to do, on the clock of `now`."""
        if not self._partial:
            return None
        if b"\r" in self._partial:
            return self._next_progress if _latest(self._partial) else None
        return self._arrived + QUIET

    def expire(self, now: float) -> bytes:
        """The unfinished line as a line of its own when its time has come."""
        deadline = self.deadline()
        return self.flush(now) if deadline is not None and now >= deadline else b""

    def flush(self, now: float) -> bytes:
        """The unfinished line, whatever the time."""
        text = _latest(self._partial)
        if b"\r" in self._partial:
            self._next_progress = now + PROGRESS
            # A carriage return already seen ends the text: what follows is a new one.
            self._partial = b"\r" if self._partial.endswith(b"\r") else b""
        else:
            self._partial = b""
        self._logged = self._logged or bool(text)
        return text + b"\n" if text else b""

    def _finish(self, lines: bytes) -> bytes:
        if b"\r" in lines:
            lines = lines.replace(b"\r\n", b"\n")
            if b"\r" in lines:
                lines = b"\n".join([_latest(line) if b"\r" in line else line for line in lines.split(b"\n")])
        first = lines.find(b"\n")
        if first > LONGEST_LINE:
            pieces = [lines[i : i + LONGEST_LINE] for i in range(0, first, LONGEST_LINE)]
            lines = b"\n".join([*pieces[:-1], lines[(len(pieces) - 1) * LONGEST_LINE :]])
        if self._logged:
            self._logged = False
            if first == 0:
                return lines[1:]
        return lines

    def _shorten(self, now: float) -> bytes:
        """Keep the unfinished line small: the latest text of a progress bar, the rest of an endless line."""
        if b"\r" in self._partial:
            self._partial = _latest(self._partial) + (b"\r" if self._partial.endswith(b"\r") else b"")
            if len(self._partial) < LONGEST_LINE and b"\r" not in self._partial:
                self._partial = b"\r" + self._partial  # still known as a progress bar
        if b"\r" in self._partial and len(self._partial) <= LONGEST_LINE:
            return self.expire(now)
        pieces = []
        while len(self._partial) >= LONGEST_LINE:
            pieces.append(self._partial[:LONGEST_LINE] + b"\n")
            self._partial = self._partial[LONGEST_LINE:]
            self._logged = True
        return b"".join(pieces)


def _latest(line: bytes) -> bytes:
    """What a terminal shows of it in the end: the text after the last carriage return that has one."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]

"""Assemble arriving bytes into complete lines as they are logged. Uses no files and no clock."""

from __future__ import annotations

import re
from itertools import pairwise

LONGEST_LINE = 65536  # bytes; an endless line is split into pieces of this length
QUIET = 1.0  # seconds after which text without a newline (a prompt) is logged as a line
PROGRESS = 1.0  # seconds between two logged states of a progress bar
OTHER_TEXTS = 8  # per line: texts that are logged although a carriage return replaces them by other words
_WORD = re.compile(rb"[A-Za-z]+")


class LineAssembler:
    """Turns one stream into lines.

    If a carriage return replaces a text by one of the same words (a progress bar, whose numbers change), the
    old text is left out, except that the latest one is logged once a second. If the words differ, the old
    text may be part of an exception's message, so the first ones of each line are logged. `now` is any clock
    in seconds that does not go backwards.
    """

    def __init__(self) -> None:
        self._partial = b""  # the unfinished line
        self._logged = False  # whether its beginning was logged, so that an empty rest is not a line
        self._others = OTHER_TEXTS
        self._arrived = 0.0
        self._next_progress = float("-inf")

    def feed(self, chunk: bytes, now: float) -> bytes:
        """The complete lines, each ending in a newline; may be empty."""
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
        """When `expire` has something to do, by the clock of `now`."""
        state, _, rest = self._partial.rpartition(b"\r")
        due = [self._next_progress] if state else []
        if rest:
            due.append(self._arrived + QUIET)
        return min(due, default=None)

    def expire(self, now: float) -> bytes:
        """A due state of a progress bar, or an unfinished line that is due to be logged."""
        state, _, rest = self._partial.rpartition(b"\r")
        if rest and now >= self._arrived + QUIET:
            return self.flush(now)
        if state and now >= self._next_progress:
            self._next_progress = now + PROGRESS
            self._partial = b"\r" + rest
            self._logged = True
            return state + b"\n"
        return b""

    def flush(self, now: float) -> bytes:
        """The unfinished line, even if it is not due."""
        text, self._partial = b"\n".join(self._kept(self._partial)), b""
        if not text:
            return b""
        self._next_progress = now + PROGRESS
        self._logged = True
        return text + b"\n"

    def _finish(self, lines: bytes) -> bytes:
        if b"\r" in lines:
            lines = lines.replace(b"\r\n", b"\n")
            if b"\r" in lines:
                lines = b"\n".join([text for line in lines.split(b"\n") for text in self._texts(line)])
        self._others = OTHER_TEXTS
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
        """Keep the unfinished line small: `<last complete state>\\r<text so far>`, and no endless text.

        A state of a progress bar is complete when the next carriage return arrives, so half a state is never
        logged.
        """
        head, cr, rest = self._partial.rpartition(b"\r")
        if len(rest) >= LONGEST_LINE:
            pieces, self._partial = _cut(rest)
        else:
            *others, state = self._kept(head)
            pieces, state = _cut(state)
            pieces = b"".join([text + b"\n" for text in others]) + pieces
            self._partial = state + cr + rest
        self._logged = self._logged or bool(pieces)
        return pieces + self.expire(now)

    def _texts(self, line: bytes) -> list[bytes]:
        if b"\r" not in line:
            return [line]
        texts = self._kept(line)
        self._others = OTHER_TEXTS
        return texts

    def _kept(self, line: bytes) -> list[bytes]:
        """Return the texts of a line that are logged, of those that replace each other.

        These are the last text, which a terminal would show, and the first ones that other words replace.
        """
        texts = [text for text in line.split(b"\r") if text.strip()]
        if len(texts) < 2:
            return texts or [line.rstrip(b"\r").rpartition(b"\r")[2]]
        kept = []
        words = set(_WORD.findall(texts[0]))
        for text, after in pairwise(texts):
            old, words = words, set(_WORD.findall(after))
            if old != words and self._others:
                self._others -= 1
                kept.append(text)
        return [*kept, texts[-1]]


def _cut(text: bytes) -> tuple[bytes, bytes]:
    """Lines of the maximum length, and the rest."""
    whole = len(text) - len(text) % LONGEST_LINE
    pieces = [text[i : i + LONGEST_LINE] + b"\n" for i in range(0, whole, LONGEST_LINE)]
    return b"".join(pieces), text[whole:]

"""Merge the lines of many files by time, in bounded memory.

Each source holds a block of its file, split into lines that already have their printed form. A window takes
from every source the lines up to a common time (the frontier, before which no source can bring more) and
sorts them. The lines of one source are in order already, and Python's sort merges ordered runs. All of this
works on bytes and in list operations; no Python function is called per line.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter

from launcher.logs.clean import harmless
from launcher.logs.fold import fold
from launcher.logs.read import TEXT_START, OffsetReader

# Here a line is `HH:MM:SS.ffffff<tag><text>`; its day is kept separately.
TIME_LENGTH = 15
_DAY = slice(0, 11)
_time = itemgetter(slice(0, TIME_LENGTH))

# Bytes of raw log held by all sources together.
MEMORY = 40 * 2**20
# Minimum and maximum bytes per read.
_BLOCKS = (8 * 2**10, 256 * 2**10)
# Lines sorted at a time.
_WINDOW = 96 * 2**10
# Maximum lines of one source in a window.
_MAX_TAKE = 4096


class Source:
    """One rank file from `reader.offset` on. `keep` filters the raw lines (`stamp text`)."""

    __slots__ = ("_end", "_later", "day", "in_order", "keep", "lines", "position", "rank", "reader", "tag")

    def __init__(
        self,
        reader: OffsetReader,
        rank: int,
        tag: bytes,
        keep: Callable[[list[bytes]], list[bytes]] | None = None,
    ) -> None:
        self.reader = reader
        self.rank = rank
        self.tag = tag
        self.keep = keep
        self.lines: list[bytes] = []
        self.position = 0
        self.day = b""
        self.in_order = True
        self._later: list[tuple[bytes, list[bytes]]] = []
        self._end = True

    def open(self) -> None:
        """Assume that there is more to read."""
        self._end = False

    @property
    def left(self) -> int:
        return len(self.lines) - self.position

    @property
    def day_is_complete(self) -> bool:
        """Whether no further line of this day can follow."""
        return self._end or bool(self._later)

    def fill(self, count: int, block: int) -> None:
        """Hold at least `count` lines of one day, if there are that many."""
        if not self.left and self._later:
            self.day, self.lines = self._later.pop(0)
            self.position, self.in_order = 0, False
        while self.left < count and not self._later and not self._end:
            data = harmless(self.reader.read(block))
            if not data:
                self._end = True
                return
            self._add(data[:-1])

    def _add(self, data: bytes) -> None:
        day = data[_DAY]
        last = data.rfind(b"\n") + 1
        if (
            self.keep is None
            and _stamped(data[:TEXT_START])
            and _stamped(data[last:])
            and data[last:][_DAY] == day
        ):
            # The usual case: one day, split in place. A line without a stamp stays with the one before it.
            self._append(day, data[len(day) :].split(b"\n" + day))
            return
        raw = _with_stamps(data.split(b"\n"))
        for part in _by_day(raw if self.keep is None else self.keep(raw)):
            self._append(part[0][_DAY], [line[len(day) :] for line in part])

    def _append(self, day: bytes, timed: list[bytes]) -> None:
        """Add lines of one day, given as `HH:MM:SS.ffffffZ text`."""
        tag = self.tag
        lines = [line.replace(b"Z ", tag, 1) for line in timed]
        # Lines with the same stamp may be out of order as bytes; then only the times are compared.
        in_order = sorted(lines) == lines
        if not self.left and not self._later:
            self.day, self.lines, self.position, self.in_order = day, lines, 0, in_order
        elif day == self.day and not self._later:
            self.lines = self.lines[self.position :] + lines
            self.position = 0
            self.in_order = self.in_order and in_order and self.lines[-len(lines) - 1] <= lines[0]
        else:
            self._later.append((day, lines))


def merge(sources: Sequence[Source], folding: bool = True) -> Iterator[tuple[bytes, list[bytes]]]:
    """Yield `(b"2026-11-21T", lines)` in order of time, as far as the files go now. Lines have no newline.

    Lines of one file keep their order even if stamps are equal. The same sources may be passed again later,
    and then yield only what is new.
    """
    for source in sources:
        source.open()
    least, most = _BLOCKS
    live = list(sources)
    while live:
        block = max(least, min(most, MEMORY // len(live)))
        take = max(8, min(_MAX_TAKE, _WINDOW // len(live)))
        for source in live:
            if source.left < take:
                source.fill(take, block)
        live = [source for source in live if source.left]
        if not live:
            return
        day = min([source.day for source in live])
        today = [source for source in live if source.day == day]
        yield day, _window(today, take, folding)


def _window(sources: Sequence[Source], take: int, folding: bool) -> list[bytes]:
    """Take the lines of `sources` (of one day) up to the frontier, in order."""
    bounds = [
        source.lines[min(source.position + take, len(source.lines) - 1)][:TIME_LENGTH]
        for source in sources
        if source.left > take or not source.day_is_complete
    ]
    frontier = min(bounds) if bounds else b"~"
    parts: list[tuple[Source, list[bytes]]] = []
    for source in sources:
        lines, start = source.lines, source.position
        if lines[start][:TIME_LENGTH] > frontier:
            continue
        # All lines of a source have the same tag, so whole lines compare like their times.
        end = bisect_right(lines, frontier + b"\xff", start)
        source.position = end
        parts.append((source, lines[start:end]))
    folded = (
        folding
        and len(parts) > 1
        and fold([(source.rank, TIME_LENGTH + len(source.tag), lines) for source, lines in parts])
    )
    merged: list[bytes] = []
    for _, lines in parts:
        merged += lines
    if folded:
        merged = list(filter(None, merged))
    if not folded and all(source.in_order for source, _ in parts):
        merged.sort()  # a third faster than by key, with the same result
    else:
        merged.sort(key=_time)
    return merged


def _stamped(line: bytes) -> bool:
    return line[26:28] == b"Z " and line[10:11] == b"T" and line[19:20] == b"."


def _with_stamps(raw: list[bytes]) -> list[bytes]:
    """Give each line that no capture wrote the stamp of the line before it."""
    stamp = b"0000-00-00T00:00:00.000000Z "
    lines = []
    for line in raw:
        if _stamped(line):
            stamp = line[:TEXT_START]
            lines.append(line)
        else:
            lines.append(stamp + line)
    return lines


def _by_day(raw: list[bytes]) -> list[list[bytes]]:
    parts: list[list[bytes]] = []
    for line in raw:
        if not parts or parts[-1][0][_DAY] != line[_DAY]:
            parts.append([])
        parts[-1].append(line)
    return parts

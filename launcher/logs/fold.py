"""Show a line that many ranks print only once: `loading the data (63 other ranks)`.

A line is folded into an equal text of another rank that came less than a second before it in the same window
of the merge. Each rank is folded into a line at most once. So a rank's own repetitions stay visible, and
every line that is left out is counted.

If more than 128 files have lines in a window, only one file in seven is searched for repeated texts. A text
that a handful of a thousand ranks share may then be shown more than once.
"""

from __future__ import annotations

from collections import deque
from itertools import compress
from operator import itemgetter

_ALL = 128
_STRIDE = 7  # coprime to the number of ranks on a node, so that no local rank is left out
_WITHIN = 1_000_000  # microseconds
_OPEN = 64  # open groups per text; bounds the work if a rank repeats a text many times

Part = tuple[int, int, list[bytes]]


def fold(parts: list[Part]) -> bool:
    """Fold in place. Return False if nothing repeats.

    A part is `(rank, start of the text in a line, lines in order of time)` of one day.

    A line begins with `HH:MM:SS.ffffff`. A line that stands for others gets the suffix ` (N other ranks)`.
    The others become empty, and the caller filters them out: no other line is empty.
    """
    repeated = _repeated(parts if len(parts) <= _ALL else parts[::_STRIDE])
    if not repeated:
        return False
    is_repeated = repeated.__contains__
    places: list[tuple[bytes, bytes, int, int]] = []
    for number, (rank, start, lines) in enumerate(parts):
        own = _own_prefix(rank)
        texts = [line[start:].removeprefix(own) for line in lines]
        places += [
            (lines[index][:15], texts[index], number, index)
            for index in compress(range(len(lines)), map(is_repeated, texts))
        ]
    places.sort(key=itemgetter(0))
    open_groups: dict[bytes, deque[_Group]] = {text: deque() for text in repeated}
    leaders: list[_Group] = []
    for clock, text, number, index in places:
        rank, _, lines = parts[number]
        groups = open_groups[text]
        while groups and clock > groups[0].same_second and _microseconds(clock) >= groups[0].until:
            groups.popleft()  # the oldest is first
        for group in groups:
            if rank not in group.ranks:
                group.ranks.add(rank)
                lines[index] = b""
                break
        else:
            if len(groups) > _OPEN:
                groups.popleft()
            groups.append(_Group(clock, rank, lines, index))
            leaders.append(groups[-1])
    for group in leaders:
        group.add_count()
    return True


class _Group:
    """A line that is shown, and the ranks that printed it."""

    __slots__ = ("index", "lines", "ranks", "same_second", "until")

    def __init__(self, clock: bytes, rank: int, lines: list[bytes], index: int) -> None:
        self.ranks = {rank}
        self.lines = lines
        self.index = index
        self.same_second = clock[:8] + b".~"  # within the same second, no calculation is needed
        self.until = _microseconds(clock) + _WITHIN

    def add_count(self) -> None:
        others = len(self.ranks) - 1
        if others:
            self.lines[self.index] += b" (%d other rank%s)" % (others, b"s" if others > 1 else b"")


def _repeated(parts: list[Part]) -> set[bytes]:
    """Texts that occur in more than one part."""
    seen: set[bytes] = set()
    repeated: set[bytes] = set()
    for rank, start, lines in parts:
        own = _own_prefix(rank)
        texts = {line[start:].removeprefix(own) for line in lines}
        if not seen.isdisjoint(texts):
            repeated |= seen & texts
        seen |= texts
    return repeated


def _own_prefix(rank: int) -> bytes:
    """The prefix that torch adds to each line of a rank's last traceback. Without it the lines are equal."""
    return b"[rank%d]: " % rank


def _microseconds(clock: bytes) -> int:
    """`HH:MM:SS.ffffff` -> microseconds of the day; 0 for anything else."""
    try:
        seconds = (int(clock[:2]) * 60 + int(clock[3:5])) * 60 + int(clock[6:8])
        return seconds * 1_000_000 + int(clock[9:15])
    except ValueError:
        return 0

"""The same line from many ranks shown once: `loading the data (63 other ranks)`.

Rule: a line is folded into an equal text of another rank that came less than a second before it in the
same window of the merge. Each rank is folded at most once into one line, so that a rank's own repetitions
stay visible and every line that is left out is counted.

Where more than 128 files have lines in a window, one file in seven is searched for repeated texts; a text
that a handful of a thousand ranks share may then be shown more than once.
"""

from __future__ import annotations

_ALL = 128
_STRIDE = 7  # prime to the number of ranks on a node, so that no local rank is left out
_WITHIN = 1_000_000  # microseconds

Part = tuple[int, int, list[bytes]]


def fold(parts: list[Part]) -> None:
    """Fold in place. A part is `(rank, start of the text in a line, lines in order of time)` of one day.

    A line begins with `HH:MM:SS.ffffff`; a line that stands for others ends in ` (N other ranks)`.
    """
    repeated = _repeated(parts if len(parts) <= _ALL else parts[::_STRIDE])
    if not repeated:
        return
    places = []
    for number, (_, start, lines) in enumerate(parts):
        places += [
            (line[start:], line[:15], number, index)
            for index, line in enumerate(lines)
            if line[start:] in repeated
        ]
    places.sort()
    # Each text has some open groups: [time of its first line, ranks in it, part and index of that line].
    groups: list[tuple[int, set[int], int, int]] = []
    folded: list[tuple[set[int], int, int]] = []
    dropped: dict[int, set[int]] = {}
    current = None
    for text, clock, number, index in places:
        if text != current:
            current, groups = text, []
        time, rank = _microseconds(clock), parts[number][0]
        groups = [group for group in groups if time - group[0] < _WITHIN]
        for _, ranks, _, _ in groups:
            if rank not in ranks:
                ranks.add(rank)
                dropped.setdefault(number, set()).add(index)
                break
        else:
            groups.append((time, {rank}, number, index))
            folded.append((groups[-1][1], number, index))
    for ranks, number, index in folded:
        if len(ranks) > 1:
            others = len(ranks) - 1
            parts[number][2][index] += b" (%d other rank%s)" % (others, b"s" if others > 1 else b"")
    for number, indexes in dropped.items():
        lines = parts[number][2]
        lines[:] = [line for index, line in enumerate(lines) if index not in indexes]


def _repeated(parts: list[Part]) -> set[bytes]:
    """Texts that occur in more than one part."""
    seen: set[bytes] = set()
    repeated: set[bytes] = set()
    for _, start, lines in parts:
        texts = {line[start:] for line in lines}
        if not seen.isdisjoint(texts):
            repeated |= seen & texts
        seen |= texts
    return repeated


def _microseconds(clock: bytes) -> int:
    """`HH:MM:SS.ffffff` -> microseconds of the day; 0 for anything else."""
    try:
        seconds = (int(clock[:2]) * 60 + int(clock[3:5])) * 60 + int(clock[6:8])
        return seconds * 1_000_000 + int(clock[9:15])
    except ValueError:
        return 0

"""Extract words that every match of a regular expression contains. Searching for them is cheaper."""

from __future__ import annotations

import sys
from typing import Any

if sys.version_info >= (3, 11):
    from re import _constants as constants
    from re import _parser as parser
else:
    import sre_constants as constants
    import sre_parse as parser

SHORTEST = 3
"Minimum characters of a word that is worth searching for."


def needed(expression: str) -> tuple[str, ...]:
    """Return lower-case words. Every match contains at least one of them. Empty if there are none."""
    return _any_of(parser.parse(expression)) or ()


def _any_of(sequence: Any) -> tuple[str, ...] | None:
    """Return the best choice among the parts of a parsed sequence, which must all match."""
    choices: list[tuple[str, ...]] = []
    run = ""
    for kind, value in [*sequence, (None, None)]:
        if kind is constants.LITERAL:
            run += chr(value).lower()
            continue
        if len(run) >= SHORTEST:
            choices.append((run,))
        run = ""
        inside: tuple[str, ...] | None = None
        if kind is constants.BRANCH:
            parts = [_any_of(branch) for branch in value[1]]
            if all(parts):
                inside = tuple(word for part in parts for word in part or ())
        elif kind is constants.SUBPATTERN:
            inside = _any_of(value[3])
        elif kind in (constants.MAX_REPEAT, constants.MIN_REPEAT) and value[0] >= 1:
            inside = _any_of(value[2])
        if inside:
            choices.append(inside)
    return max(choices, key=lambda words: min(map(len, words)) - len(words) / 10, default=None)

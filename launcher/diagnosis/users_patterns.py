"""Search for the job's and the cluster profile's own patterns, at a bounded cost."""

from __future__ import annotations

from launcher.diagnosis.clue import Kind
from launcher.diagnosis.literals import needed

SECONDS = 0.2
"Time limit per line. A reasonable expression takes microseconds."
STRIKES = 3
"Number of lines on which a pattern may exceed the limit before it is no longer searched for."


class UserPattern:
    """A user's expression, with a time limit for its search.

    Some expressions take time that grows with a power of the line's length, or doubles with each character.
    No check of the expression finds all of them, so the search itself is interrupted.
    """

    def __init__(self, expression: str, kind: Kind) -> None:
        import regex  # re cannot be interrupted. Imported here because few jobs have patterns of their own.

        self.expression, self.kind = expression, kind
        self._expression = regex.compile(expression)
        self._words = [word.encode() for word in needed(expression)]
        self._strikes = 0

    @property
    def given_up(self) -> bool:
        return self._strikes >= STRIKES

    def may_match(self, lines: bytes) -> bool:
        """Return whether a line of the chunk may match."""
        if self.given_up:
            return False
        low = lines.lower()
        return not self._words or any(word in low for word in self._words)

    def matches(self, line: str) -> bool:
        if self.given_up:
            return False
        try:
            return self._expression.search(line, timeout=SECONDS) is not None
        except TimeoutError:
            self._strikes += 1
            return False

"""Expressions of the job and of the cluster profile: any that a user writes, at a bounded cost."""

from __future__ import annotations

from launcher.diagnosis.clue import Kind
from launcher.diagnosis.literals import needed

SECONDS = 0.2
"For one line; a sane expression takes microseconds."
STRIKES = 3
"Lines on which it may take longer, before it is not searched any more."


class OwnWords:
    """A user's expression. Some take time that grows with a power of the line's length, or doubles with each
    character, and no check of the expression finds all of them: the search itself is ended."""

    def __init__(self, expression: str, kind: Kind) -> None:
        import regex  # re cannot be interrupted; few jobs have words of their own

        self.expression, self.kind = expression, kind
        self._expression = regex.compile(expression)
        self._words = [word.encode() for word in needed(expression)]
        self._strikes = 0

    @property
    def given_up(self) -> bool:
        return self._strikes >= STRIKES

    def may_match(self, lines: bytes) -> bool:
        """Whether some line of a chunk has to be looked at."""
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

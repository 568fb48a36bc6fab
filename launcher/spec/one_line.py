"""Print text from users, jobs and ranks safely on one line: control characters become escape sequences."""

from __future__ import annotations


def plain(text: object) -> str:
    """Return the text as one line, with unprintable characters such as ESC and newline escaped."""
    return "".join(map(spelled, str(text)))


def spelled(one: str) -> str:
    """Return a character, or its escape sequence if it is not printable."""
    return one if one.isprintable() else one.encode("unicode_escape", "surrogatepass").decode()

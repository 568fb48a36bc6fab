"""Print text from users, jobs and ranks safely on one line: control characters become escape sequences."""

from __future__ import annotations


def plain(text: object) -> str:
    """Return the text as one line, with unprintable characters such as ESC and newline escaped."""
    return "".join(map(escaped, str(text)))


def escaped(character: str) -> str:
    """Return a character, or its escape sequence if it is not printable."""
    if character.isprintable():
        return character
    return character.encode("unicode_escape", "surrogatepass").decode()

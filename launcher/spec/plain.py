"""Text from users, jobs and ranks as one line: what a terminal would act on is spelled out."""

from __future__ import annotations


def plain(text: object) -> str:
    """Return one line of printable characters; everything else, such as ESC and newline, is spelled out."""
    return "".join(map(spelled, str(text)))


def spelled(one: str) -> str:
    """Return a character, or its escape sequence if it is not printable."""
    return one if one.isprintable() else one.encode("unicode_escape", "surrogatepass").decode()

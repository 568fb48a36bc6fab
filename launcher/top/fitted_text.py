"""Prepare log lines and long names for the screen."""

from __future__ import annotations

from rich.text import Text

from launcher.logs.clean import harmless
from launcher.spec.one_line import escaped


def log_line(line: bytes) -> Text:
    """Return a line of a log with its colours. Other unprintable characters are escaped."""
    text = harmless(line).decode(errors="replace").expandtabs()
    return Text.from_ansi("".join(char if char == "\x1b" else escaped(char) for char in text))


def shortened(text: str, width: int) -> str:
    """Shorten a text in the middle, because both ends of a run's id identify the run."""
    if len(text) <= width:
        return text
    tail = (width - 1) * 2 // 3
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"

"""Text from jobs and ranks for the screen: what a terminal would act on is spelled out."""

from __future__ import annotations

from rich.text import Text

from launcher.logs.clean import harmless


def plain(text: object) -> str:
    """Return one line of printable characters; everything else, such as ESC, is spelled out."""
    return "".join(map(_spelled, str(text)))


def log_line(line: bytes) -> Text:
    """Return a line of a log. Colours stay; everything else that is not printable is spelled out."""
    text = harmless(line).decode(errors="replace").expandtabs()
    return Text.from_ansi("".join(one if one == "\x1b" else _spelled(one) for one in text))


def shortened(text: str, width: int) -> str:
    """Leave out the middle of a longer text, because both ends of a run's id name the run."""
    if len(text) <= width:
        return text
    tail = (width - 1) * 2 // 3
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"


def _spelled(one: str) -> str:
    return one if one.isprintable() else one.encode("unicode_escape", "surrogatepass").decode()

"""Check text that is passed to a process. Imports nothing, because every rank's worker loads it at start."""

from __future__ import annotations


def no_nul(text: str) -> str:
    """Return the text. Raises ValueError if it contains a NUL byte or invalid unicode."""
    if "\0" in text:
        raise ValueError("contains a NUL byte, which no process can receive")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("is not valid unicode text (a lone surrogate)") from None
    return text

"""Text that can be passed to a process. Imports nothing: each rank's watcher starts with this."""

from __future__ import annotations


def no_nul(text: str) -> str:
    """The text itself. Raises ValueError for a NUL byte or broken unicode, where it is written."""
    if "\0" in text:
        raise ValueError("contains a NUL byte, which no process can receive")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("is not valid unicode text (a lone surrogate)") from None
    return text

"""The only format of time stamps: UTC, microseconds, 27 characters, sorts as text.

This file is also sent to ssh hosts and runs there, so it uses only the standard library.
"""

from __future__ import annotations

import time as _time
from datetime import datetime
from functools import lru_cache

STAMP_LENGTH = 27


def stamp(seconds: float) -> str:
    """Unix seconds -> `2026-11-21T08:54:01.123456Z`."""
    whole, micro = divmod(round(seconds * 1e6), 1_000_000)
    return f"{_second(whole)}.{micro:06d}Z"


@lru_cache(maxsize=1)  # a short step writes several stamps of one second
def _second(whole: int) -> str:
    return _time.strftime("%Y-%m-%dT%H:%M:%S", _time.gmtime(whole))


def now() -> str:
    return stamp(_time.time())


def seconds_of(text: str) -> float | None:
    """The inverse of `stamp`; None if the text is not a time stamp."""
    try:
        whole = datetime.fromisoformat(f"{text[:19]}+00:00").timestamp()  # ten times as fast as strptime
        return whole + float(f"0.{text[20:].rstrip('Z') or '0'}")
    except ValueError:
        return None

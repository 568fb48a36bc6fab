"""Sizes, rates and durations: field types, parsers and texts."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

GIB = 2**30
_BYTES_PER_UNIT = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_SECONDS_PER_UNIT = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_bytes(text: Any) -> Any:
    """Parse `"47.4GiB"` into bytes. GiB = 2^30 bytes, GB = 10^9 bytes; a bare integer is bytes."""
    if not isinstance(text, str):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _BYTES_PER_UNIT:
        raise ValueError(f"{text!r} is not a size; write for example 48GiB (2^30 bytes) or 48GB (10^9 bytes)")
    return _whole_number(float(match[1]) * _BYTES_PER_UNIT[match[2].upper()], text)


def _whole_number(number: float, text: str) -> int:
    """Return a whole number. Raises ValueError if it does not fit into 64 bits."""
    if number >= 2**63:
        raise ValueError(f"{text[:40]!r} is too large")
    return int(number)


def parse_threshold(text: Any) -> Any:
    """Parse a threshold: `"90%"` stays text; a size becomes bytes, as in `parse_bytes`."""
    if not isinstance(text, str):
        return text
    share = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    if share is None:
        try:
            return parse_bytes(text)
        except ValueError:
            raise ValueError(
                f"{text!r} is neither a size nor a share; write for example 45GiB or 90%"
            ) from None
    if not 0 < float(share[1]) <= 100:
        raise ValueError(f"{text!r} must be more than 0% and at most 100%")
    return f"{share[1]}%"


def threshold_bytes(threshold: int | str, capacity: int) -> int:
    """Return a parsed threshold in bytes. A percentage is relative to `capacity`, in bytes."""
    if isinstance(threshold, str):
        return int(capacity * float(threshold.rstrip("%")) / 100)
    return threshold


def parse_rate(text: Any) -> Any:
    """Parse `"400Gb/s"` (10^9 bits) or `"50GB/s"` (10^9 bytes) into bytes/s; a bare number is bytes/s."""
    if not isinstance(text, str):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([GMT])(b|B)(?:it)?/s\s*", text)
    if match is None:
        raise ValueError(f"{text!r} is not a rate; write for example 400Gb/s (bits) or 50GB/s (bytes)")
    per_second: float = float(match[1]) * {"M": 1e6, "G": 1e9, "T": 1e12}[match[2]]
    return per_second / 8 if match[3] == "b" else per_second


def parse_seconds(text: Any) -> Any:
    """Parse `"90m"`, `"1d12h"`, `"HH:MM:SS"` or Slurm's `"D-HH:MM:SS"`; a bare integer is seconds."""
    if not isinstance(text, str):
        return text
    clock = re.fullmatch(r"\s*(?:(\d+)-)?(\d+):(\d\d):(\d\d)\s*", text)
    if clock is not None:
        days, hours, minutes, seconds = (float(part or 0) for part in clock.groups())
        return _whole_number(((days * 24 + hours) * 60 + minutes) * 60 + seconds, text)
    if re.fullmatch(r"\s*\d+\s*", text):
        return _whole_number(float(text), text)
    if re.fullmatch(r"\s*(\d+[smhd])+\s*", text):
        parts = re.findall(r"(\d+)([smhd])", text)
        return _whole_number(sum(float(number) * _SECONDS_PER_UNIT[unit] for number, unit in parts), text)
    raise ValueError(f"{text!r} is not a duration; write for example 90m, 24h, 1d12h or 2-12:00:00")


def format_bytes(size: int | float) -> str:
    """Format bytes with four digits: `"47.4 GiB"` (2^30); small sizes in MiB, KiB or B."""
    for unit, name in ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(size) >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size:.4g} B"


def written_bytes(size: int) -> str:
    """Format bytes as a profile has them, rounded down: `"47.4GiB"`."""
    return f"{int(size / GIB * 10) / 10:g}GiB"


def counted(number: int, noun: str) -> str:
    """Format a number of things: `"1 run"`, `"3 runs"`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def format_duration(seconds: int | float) -> str:
    """Format seconds as the two largest units: `"1d 2h"`, `"3m 20s"`, `"4s"`."""
    rest, parts = round(seconds), []
    for unit in ("d", "h", "m", "s"):
        count, rest = divmod(rest, _SECONDS_PER_UNIT[unit])
        if count:
            parts.append(f"{count}{unit}")
    return " ".join(parts[:2]) or "0s"


def _with_unit(size: int) -> int:
    if size < 2**20:
        raise ValueError(f"{size} bytes are too few; write the unit, for example {size}GiB")
    return size


Bytes = Annotated[int, BeforeValidator(parse_bytes, json_schema_input_type=str | int), Field(gt=0, lt=2**63)]
Memory = Annotated[Bytes, AfterValidator(_with_unit)]
"Memory of a machine or a GPU in bytes. A number that was written without its unit is an error."
Threshold = Annotated[int | str, BeforeValidator(parse_threshold, json_schema_input_type=str | int)]
Rate = Annotated[float, BeforeValidator(parse_rate, json_schema_input_type=str | float), Field(gt=0)]
Seconds = Annotated[
    int, BeforeValidator(parse_seconds, json_schema_input_type=str | int), Field(gt=0, lt=2**31)
]

"""The base of every value, and the quantities a user writes (sizes and durations)."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

GIB = 2**30

_BYTES_PER_UNIT = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_SECONDS_PER_UNIT = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class Value(BaseModel):
    """A frozen, printable value. Unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


def parse_bytes(text: Any) -> Any:
    """`"47.4GiB"` -> bytes. GiB = 2^30 bytes, GB = 10^9 bytes; a bare integer is bytes."""
    if not isinstance(text, str):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _BYTES_PER_UNIT:
        raise ValueError(f"{text!r} is not a size; write for example 48GiB (2^30 bytes) or 48GB (10^9 bytes)")
    return int(float(match[1]) * _BYTES_PER_UNIT[match[2].upper()])


def parse_threshold(text: Any) -> Any:
    """`"90%"` stays text; a size becomes bytes, as in `parse_bytes`."""
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
    """A parsed threshold in bytes, where `capacity` bytes are all."""
    if isinstance(threshold, str):
        return int(capacity * float(threshold.rstrip("%")) / 100)
    return threshold


def parse_rate(text: Any) -> Any:
    """`"400Gb/s"` (10^9 bits) or `"50GB/s"` (10^9 bytes) -> bytes per second; a bare number is bytes."""
    if not isinstance(text, str):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([GMT])(b|B)(?:it)?/s\s*", text)
    if match is None:
        raise ValueError(f"{text!r} is not a rate; write for example 400Gb/s (bits) or 50GB/s (bytes)")
    per_second = float(match[1]) * {"M": 1e6, "G": 1e9, "T": 1e12}[match[2]]
    return per_second / 8 if match[3] == "b" else per_second


def parse_seconds(text: Any) -> Any:
    """`"90m"`, `"1d12h"`, `"HH:MM:SS"` or Slurm's `"D-HH:MM:SS"` -> seconds; a bare integer is seconds."""
    if not isinstance(text, str):
        return text
    clock = re.fullmatch(r"\s*(?:(\d+)-)?(\d+):(\d\d):(\d\d)\s*", text)
    if clock is not None:
        days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if re.fullmatch(r"\s*\d+\s*", text):
        return int(text)
    if re.fullmatch(r"\s*(\d+[smhd])+\s*", text):
        return sum(int(n) * _SECONDS_PER_UNIT[unit] for n, unit in re.findall(r"(\d+)([smhd])", text))
    raise ValueError(f"{text!r} is not a duration; write for example 90m, 24h, 1d12h or 2-12:00:00")


def format_bytes(size: int | float) -> str:
    """Bytes -> `"47.4 GiB"` (2^30), with as many digits as matter; small sizes in MiB, KiB or B."""
    for unit, name in ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(size) >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size:.4g} B"


def format_duration(seconds: int | float) -> str:
    """Seconds -> `"1d 2h"`, `"3m 20s"`, `"4s"`: the two largest units."""
    rest, parts = round(seconds), []
    for unit in ("d", "h", "m", "s"):
        count, rest = divmod(rest, _SECONDS_PER_UNIT[unit])
        if count:
            parts.append(f"{count}{unit}")
    return " ".join(parts[:2]) or "0s"


def _scalar_to_str(value: Any) -> Any:
    """YAML reads `NCCL_DEBUG: 1` as a number; an environment value is text."""
    if isinstance(value, bool):
        raise ValueError(f"write {str(value).lower()!r} in quotes: the process receives text")
    return str(value) if isinstance(value, int | float) else value


Bytes = Annotated[int, BeforeValidator(parse_bytes, json_schema_input_type=str | int), Field(gt=0)]
Threshold = Annotated[int | str, BeforeValidator(parse_threshold, json_schema_input_type=str | int)]
Rate = Annotated[float, BeforeValidator(parse_rate, json_schema_input_type=str | float), Field(gt=0)]
Seconds = Annotated[int, BeforeValidator(parse_seconds, json_schema_input_type=str | int), Field(gt=0)]
Text = Annotated[str, BeforeValidator(_scalar_to_str, json_schema_input_type=str | int | float)]
EnvName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]

"""Decode protocol buffers without their schema, as far as logs of metrics require it.

Source: https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

from collections.abc import Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"Wire types."


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (field number, value) in order: an int for a varint, bytes for everything else.

    Raises ValueError if the message is damaged.
    """
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if kind == BYTES:
            length, at = _varint(data, at)
        elif kind in (FIXED32, FIXED64):
            length = 4 if kind == FIXED32 else 8
        else:
            raise ValueError(f"wire type {kind}")
        if at + length > len(data):
            raise ValueError("the message is cut off")
        yield number, data[at : at + length]
        at += length


def parts(data: bytes, number: int) -> Iterator[bytes]:
    """Yield the values of a repeated field of messages or strings. Raises ValueError."""
    return (value for field, value in fields(data) if field == number and isinstance(value, bytes))


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not byte & 0x80:
            return value, at
    raise ValueError("a varint is cut off")

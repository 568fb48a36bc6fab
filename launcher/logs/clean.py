"""Bytes of a program made safe to print: colours stay, all else that steers a terminal is spelled out."""

from __future__ import annotations

import re

# Of the control bytes these are acted upon by terminals (console_codes(4)); tab and newline are text.
_STEERING = tuple(bytes([code]) for code in b"\x1b\r\x08\x07\0\x05\x0b\x0c\x0e\x0f\x11\x13\x18\x1a\x7f\xc2")
# A colour; or a control byte; or one of C1 in UTF-8 (U+0080 to U+009F), which xterm obeys as well.
_CONTROL = re.compile(rb"(\x1b\[[0-9;:]*m)|[\x00-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]")
_COLOURED_LINE = re.compile(rb"(\x1b\[[0-9;:]*m[^\n]*)")
RESET = b"\x1b[0m"


def harmless(block: bytes) -> bytes:
    """Lines in, as many lines out. Control bytes become `^[` and the like; a colour ends with its line."""
    # 16 searches by memchr are a third of the price of one pass by a regular expression, and mostly suffice.
    for code in _STEERING:
        if code in block:
            break
    else:
        return block
    block = _CONTROL.sub(_spell_out, block)
    return _COLOURED_LINE.sub(rb"\1" + RESET, block) if b"\x1b" in block else block


def _spell_out(match: re.Match[bytes]) -> bytes:
    found = match[0]
    if match[1] is not None:
        return found
    if len(found) == 2:
        return b"<%02x>" % found[1]
    return b"^" + bytes([found[0] ^ 0x40])

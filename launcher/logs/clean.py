"""Make a program's output safe to print: colours stay, other terminal control sequences are spelled out."""

from __future__ import annotations

import re

# Control bytes that terminals act on (console_codes(4)), and the first byte of a C1 control in UTF-8. Tab and
# newline count as text.
_STEERING = b"\x1b\r\x08\x07\0\x05\x0b\x0c\x0e\x0f\x11\x13\x18\x1a\x7f\xc2"
_TEXT = bytes(code for code in range(256) if code not in _STEERING)
# A colour, a control byte, or a C1 control in UTF-8 (U+0080 to U+009F), which xterm obeys too.
_CONTROL = re.compile(rb"(\x1b\[[0-9;:]*m)|[\x00-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]")
_COLOURED_LINE = re.compile(rb"(\x1b\[[0-9;:]*m[^\n]*)")
RESET = b"\x1b[0m"


def harmless(block: bytes) -> bytes:
    """Spell out control bytes as `^[` and the like, and end colours with their line.

    Keeps the number of lines.
    """
    if not block.translate(None, _TEXT):  # some forty times as fast as the regular expression
        return block
    block = _CONTROL.sub(_spell_out, block)
    return _COLOURED_LINE.sub(rb"\1" + RESET, block) if b"\x1b" in block else block


def _spell_out(match: re.Match[bytes]) -> bytes:
    control = match[0]
    if match[1] is not None:
        return control
    if len(control) == 2:
        return b"<%02x>" % control[1]
    return b"^" + bytes([control[0] ^ 0x40])

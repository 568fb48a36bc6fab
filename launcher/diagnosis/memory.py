"""Read from an exception's text which memory ran out, and the sizes in it."""

from __future__ import annotations

import math
import re

from launcher.diagnosis.clue import CLASS_OF as CLASS_OF_KIND
from launcher.diagnosis.clue import MEMORY_OF
from launcher.diagnosis.collector import pattern_of
from launcher.diagnosis.lines import normalise
from launcher.spec.verdict import FailureClass, MemoryKind, OutOfMemory

CLASS_OF: dict[MemoryKind, FailureClass] = {memory: CLASS_OF_KIND[kind] for kind, memory in MEMORY_OF.items()}

_SIZE = r"\s*([\d,]*\.?\d+)\s*([KMGT]?)(?:i?B|bytes)?\b"
_REQUESTED = re.compile(
    r"(?:[Tt]ried to allocate|trying to allocate|[Mm]emory allocating|Failed to allocate request for|"
    r"Failed to CUDA [cm]alloc(?: async| host)?|Unable to allocate|"
    r"[Ff]ail(?:ed)? to alloc(?:ate)?(?: memory(?: of)?)?|"
    r"memory of size:|in memory space hbm\. Used|Attempting to (?:allocate|reserve))" + _SIZE
)
# Before torch 2.0: `(GPU 0; 6.00 GiB total capacity; 781.59 MiB already allocated; 3.03 GiB free; ...)`.
# Until 2.2 it was spelled "capacty".
_TOTAL = re.compile(
    r"total\s+capaci?ty\s+of" + _SIZE + r"|;" + _SIZE + r" total capacity|hbm\. Used \S+ of" + _SIZE
)
_FREE = re.compile(
    r"of\s+which" + _SIZE + r"\s+is\s+free|;" + _SIZE + r" free;|not possible\. There are" + _SIZE + " free"
)
_SHAPED = re.compile(r"OOM when allocating tensor with shape\[([\d,]+)\] and type (\w+)")
_WIDTHS = {"float": 4, "half": 2, "bfloat16": 2, "double": 8, "int32": 4, "int64": 8, "bool": 1, "uint8": 1}
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def out_of_memory(text: str) -> OutOfMemory | None:
    """Return which memory ran out according to these lines, and their sizes; None for any other failure.

    A line about shared memory explains the others, which are about a full device.
    """
    patterns = (pattern_of(normalise(line).text) for line in text.splitlines())
    kinds = [
        MEMORY_OF[pattern.kind] for pattern in patterns if pattern is not None and pattern.kind in MEMORY_OF
    ]
    if not kinds:
        return None
    return OutOfMemory(kind="shared" if "shared" in kinds else kinds[0], **sizes(text))


def sizes(text: str) -> dict[str, int | None]:
    """Return the bytes asked for, the capacity and the free bytes, as far as a message states them."""
    requested = _size(_REQUESTED, text)
    if requested is None and (shaped := _SHAPED.search(text)) and shaped[2] in _WIDTHS:
        requested = math.prod(map(int, shaped[1].split(","))) * _WIDTHS[shaped[2]]
    return {"requested": requested, "total": _size(_TOTAL, text), "free": _size(_FREE, text)}


def _size(pattern: re.Pattern[str], text: str) -> int | None:
    """Bytes. All of these libraries count in powers of 1024, whatever they call the units."""
    match = pattern.search(text)
    if match is None:
        return None
    number, unit = [group for group in match.groups() if group is not None]
    return int(float(number.replace(",", "")) * 1024 ** _POWERS[unit])

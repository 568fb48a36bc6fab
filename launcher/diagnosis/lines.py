"""Strip what precedes a program's own output in a line: colours, time stamps, log levels, ranks, boxes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07|\^\[\[[0-9;]*m")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_LABEL = re.compile(
    r"""\s*(?:
      \[(?:rank\s?\d+|default\d+|(?:node|host|worker|gpu)[-_ ]?\d+|\d{1,4}|\d+,\d+)\]
      (?:<std(?:out|err)>)?:?[ ]?
    | \([^()]{0,60}\bpid=\d+[^()]{0,60}\)[ ]?
    | \((?:node|worker|rank|head)[-_ ]?[\w.-]*\)[ ]?
    | \d{1,4}:[ ](?=\S|\s{2})
    | (?:rank|worker|node|gpu)[-_ ]?\d+(?:\.[\w.-]+)?[ ]?(?:\||:)[ ]?
    | [\w.-]{1,60}[-_.]\d{1,4}(?:\.\w+@[\w.-]+)?[ ]+\|[ ]
    | [\w.-]+/[\w.-]+[ ]\[[\w.-]+\][ ]
    | \[pod/[\w.-]+/[\w.-]+\][ ]  # kubectl logs --prefix
    | [\w.-]+[ ][\w./@-]+\[\d+\]:[ ]  # journalctl
    | [\w.-]+[ ][\w.]+\[\d+\][ ](?=(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)[ ])  # coloredlogs
    | (?:\d{1,3}\.){3}\d{1,3}(?:[ ]\[\d+\]|:(?=[ ]))[ ]?
    )""",
    re.VERBOSE | re.IGNORECASE,
)
_STAMP = re.compile(
    r"""(?:
      [\[(|]?\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,:]\d+)?(?:Z|[ ]?[+-]\d\d:?\d\d)?(?:[ ]UTC)?[\])|]?
    | (?:\d\d-\d\d[ ])?[\[(]?\d\d:\d\d:\d\d(?:[.,]\d+)?[\])]?
    | (?:\w{3}[ ])?\w{3}[ ]+\d{1,2}[ ]\d\d:\d\d:\d\d(?:[ ]\d{4})?
    | \d{10}\.\d{3,9}(?=[ ])
    | \d\d[EO][ +]  # GitLab
    | E[ ]{3}(?=[ ]*\S)  # pytest
    | (?:stdout|stderr)[ ][FP](?=[ ])  # Kubernetes, on the node
    | [\w.]+[ ]-[ ](?=(?:DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL|FATAL)\b)
    | [IWEF]\d{4}[ ]\d\d:\d\d:\d\d\.\d+[ ]+\d+[ ][\w./-]+:\d+\]
    | (?!FATAL:[ ]{3})  # Singularity's, whose table row needs the level
      [\[(]?(?:DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL|FATAL|stdout|stderr)[\])]?(?=[ \t:|\-\]]|$)
    | (?:\[[\w.:-]+[ ]*\][ ]?)?\[(?i:debug|info|warn|warning|error|critical|fatal)\]  # spdlog
    | \[[\d,]+ms\](?=[ ])  # Omniverse
    | [-|:,](?=[ ])
    )[ ]*[-|:]?[ \t]?""",
    re.VERBOSE,
)
_PLACE = re.compile(r"\[?[\w./-]+\.py:\d+\](?: |$)")
"The source location that a logger printed. The text after it may be indented."
_BOX = re.compile(r"^\s*[│┃|][ ](?=\s*\S)|\s*[│┃]\s*$")
_GROUP = re.compile(r"^\s*\|[ ](?:[ ]{2}\|[ ])*(?=\s*\S)")
_WARNING = re.compile(
    r": W \w|\b(?<!NCCL )WARN(?:ING)?\b|\bW\d{4} |\[W\b|\b\w*Warning\b(?!s)|\[warn(?:ing)?\]"
)
_MINOR = re.compile(r"\b(?:INFO|DEBUG)\b|\[(?i:info|debug)\]")
_SEVERE = re.compile(r"\b(?:ERROR|CRITICAL|FATAL)\b|\[(?i:error|critical|fatal)\]")
_RANK_AT_END = re.compile(r"\[rank\d+\]: $")
_MAX = 2000
"Characters that are read at the beginning and at the end of a long line."


_PIECE = 65_536
"Bytes of a line that are read at a time. Of a longer line, the first and the last piece are kept."


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file in bounded memory.

    Of a very long line, the beginning and the end are kept.
    """
    while first := file.readline(_PIECE):
        last, piece = b"", first
        while not piece.endswith(b"\n") and (piece := file.readline(_PIECE)):
            last = (last + piece)[-_PIECE:]
        yield first + last


_TEXTS = ("log", "message", "msg", "textPayload", "event", "exc_info", "exception", "stack_trace")
"Keys of what a program printed or logged, with its traceback, in JSON of Docker, Google Cloud and loggers."
_LEVELS = ("level", "levelname")
"Keys of a logger's level. Google Cloud's `severity` only distinguishes stdout from stderr."
_ESCAPED = b"Traceback (most recent call last):\\n"


def unwrapped(line: bytes) -> list[bytes]:
    """Return the lines of output that a collector has put into one line, as JSON or with escaped ends."""
    head = line.partition(b"{")[0]
    if line.endswith(b"}") and normalise(head + b"{").text == "{" and (texts := _texts_in(line[len(head) :])):
        # Docker may hold a logger's JSON, and Kubernetes puts a time before it.
        return [head + inner for text in texts for inner in unwrapped(text)]
    if _ESCAPED in line:
        return line.replace(b"\\n", b"\n").split(b"\n")
    return [line]


def _texts_in(line: bytes) -> list[bytes]:
    """Return the lines in a JSON record; empty if there are none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # not JSON, or not UTF-8
        return []
    payload = record.get("jsonPayload")
    record = payload if isinstance(payload, dict) else record
    texts = [text for key in _TEXTS if isinstance(text := record.get(key), str)]
    if not texts:
        return []
    level = next((f"{record[key]} ".upper() for key in _LEVELS if key in record), "")
    return f"{level}{chr(10).join(texts)}".rstrip("\n").encode(errors="replace").split(b"\n")


class Line(NamedTuple):
    label: str
    "The rank's name that a collector printed before the line. Lines of different ranks are interleaved."
    text: str
    "The text without prefixes but with its indentation."
    warning: bool
    "Whether a logger or Python's `warnings` printed it as a warning."
    minor: bool
    "Whether a logger printed it below the level of a warning."
    severe: bool
    "Whether a logger printed it as an error."
    stamped: bool
    "Whether it has a time or a level. Then a logger wrote it, and loggers write immediately."


def printable(raw: bytes | str) -> str:
    """Return a line without colours and control characters."""
    text = raw.decode(errors="replace") if isinstance(raw, bytes) else raw
    return _CONTROL.sub("", _ANSI.sub("", text))


def normalise(raw: bytes | str) -> Line:
    """Split a line into its text and the prefixes before it."""
    text = raw.decode(errors="replace") if isinstance(raw, bytes) else raw
    text = printable(text[:_MAX] + text[-_MAX:] if len(text) > 2 * _MAX else text).rstrip()
    warning, minor, severe, stamped = _WARNING.search(text) is not None, False, False, False
    if text[:1] in " |+│┃" and text.lstrip()[:1] in ("|", "+", "│", "┃"):
        text = _BOX.sub("", _BOX.sub("", text)) if "│" in text or "┃" in text else _GROUP.sub("", text)
    label = ""
    for _ in range(8):
        if match := _LABEL.match(text):
            label += match[0].strip()
        elif stamped and (match := _PLACE.match(text)):
            pass
        else:
            match = _STAMP.match(text)
            stamp = match[0] if match else ""
            minor = minor or _MINOR.search(stamp) is not None
            severe = severe or _SEVERE.search(stamp) is not None
            stamped = stamped or any(map(str.isalnum, stamp))
        if not match or not match[0]:
            break
        text = text[match.end() :]
    return Line(label, text, warning, minor, severe, stamped)


def rank_at_end(text: str) -> tuple[str, str]:
    """Split the rank off the end of a text; empty if there is none.

    Torch prints the rank before each line of an exception. The first line may follow a progress bar that has
    not ended its line.
    """
    match = _RANK_AT_END.search(text)
    return (text[: match.start()], match[0].strip()) if match else (text, "")

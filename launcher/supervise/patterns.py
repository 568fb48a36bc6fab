"""What failures look like in text. The last resort: files and exit codes are asked first."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from launcher.logs.out_of_memory import CLASS_OF, out_of_memory
from launcher.spec.verdict import FailureClass, OutOfMemory

# Order matters: the first class with a match wins. Sources: messages of torch 2.11-2.13, NCCL 2.2x,
# gloo, glibc and the Linux kernel, as they stand in issue reports.
_PATTERNS: tuple[tuple[FailureClass, tuple[str, ...]], ...] = (
    (
        "rendezvous-failed",
        (
            r"Rendezvous\w*Error",
            r"connectFullMesh failed",
            r"[Aa]ddress already in use",
            r"EADDRINUSE",
            r"The client socket has (timed out|failed to connect)",
            r"The server socket has failed to listen",
        ),
    ),
    (
        "nccl-timeout",
        (
            r"Watchdog caught collective operation timeout",
            r"DistBackendError",
            r"ncclRemoteError|ncclSystemError|ncclInternalError|ncclUnhandledCudaError",
            r"NCCL (timeout|error)",
            r"Timed out waiting \d+ms for",
            r"Connection closed by peer",
            r"Connection reset by peer",
        ),
    ),
)
_COMPILED = tuple((name, re.compile("|".join(parts))) for name, parts in _PATTERNS)
_DISK_FULL = re.compile(r"No space left on device|Disk quota exceeded")
_PREFIX = re.compile(r"^\[rank\d+\]: ?")
_EXCEPTION = re.compile(r"^(?:\[rank\d+\]: ?)?((?:[A-Za-z_]\w*\.)*[A-Z]\w*)(?:: (.*))?$")
_TRACEBACK = "Traceback (most recent call last)"
_CHAINED = re.compile(r"another exception occurred:|direct cause of the following exception:")
_MESSAGE_LINES = 12
"What is read of an exception's message."
_LAST_WORDS = 2
"""Lines in which a program without a traceback says why it ends, such as an error and a hint. Memory that ran
out before them was looked after."""
_TERMINATED = "terminate called"  # C++; its message and its stack follow

# Exceptions in which torch tells of its network; a ConnectionError is the user's own network.
_NETWORK = frozenset({"nccl-timeout", "rendezvous-failed"})
_NETWORK_EXCEPTION = re.compile(r"(?:[\w.]+\.)?(?:RuntimeError|Dist\w*Error|Rendezvous\w*Error)\b")


class Found(NamedTuple):
    """A class, and what says so."""

    failure: FailureClass
    text: str
    memory: OutOfMemory | None = None


def class_of_end(lines: Iterable[str]) -> Found | None:
    """The class that a program's last lines speak of; a Python exception outranks what came before it."""
    lines = list(lines)
    chain = _exceptions(lines)
    if not chain:
        return class_of_text(lines)
    found = class_of_exception(chain[-1])
    if found is not None and found.failure in _NETWORK:
        # NCCL's exception does not always tell why; the lines that it has printed do.
        return _memory_in(line for line in lines if "NCCL WARN" in line) or found
    # An exception that was raised while another one was handled hides the cause.
    return found or next((one for text in chain[-2::-1] if (one := _memory_in([text]))), None)


def class_of_exception(text: str) -> Found | None:
    """Of one exception, `Type: message`. Below the first line, where others may print, only memory counts."""
    found = _memory_in([text]) or class_of_text([text.partition("\n")[0]])
    if found is not None and found.failure in _NETWORK and not _NETWORK_EXCEPTION.match(text):
        return None
    return found


def class_of_text(lines: Iterable[str]) -> Found | None:
    """The class that the lines speak of, and the line that says so."""
    lines = list(lines)
    memory = _memory_in(_last_words(lines))
    if memory is not None and memory.memory is not None and memory.memory.kind == "shared":
        return memory  # /dev/shm is a disk of its own
    for line in reversed(lines):
        if _DISK_FULL.search(line):
            return Found("user-error", line.strip())
    if memory is not None:
        return memory
    for name, pattern in _COMPILED:
        for line in reversed(lines):
            if pattern.search(line):
                return Found(name, line.strip())
    return None


def _last_words(lines: Sequence[str]) -> Sequence[str]:
    terminated = [number for number, line in enumerate(lines) if _TERMINATED in line]
    if terminated:
        return lines[terminated[-1] :]
    return [line for line in lines if line.strip()][-_LAST_WORDS:]


def _memory_in(lines: Iterable[str]) -> Found | None:
    """The last line that speaks of it; one about shared memory outranks those that came of it."""
    told = [Found(CLASS_OF[one.kind], line.strip(), one) for line in lines if (one := out_of_memory(line))]
    shared = [found for found in told if found.memory is not None and found.memory.kind == "shared"]
    return next(iter((shared or told)[::-1]), None)


def exception_of(lines: Iterable[str]) -> str | None:
    """`Type: message` of the last Python traceback in the lines; of the message its first line."""
    chain = _exceptions(list(lines))
    return chain[-1].partition("\n")[0] if chain else None


def _exceptions(lines: Sequence[str]) -> list[str]:
    """The last exception with its message, after those that it came of."""
    found: list[str] = []
    begin, in_traceback = 0, False
    for number, line in enumerate(lines):
        if _TRACEBACK in line:
            if not any(_CHAINED.search(before) for before in lines[begin:number]):
                found = []
            in_traceback = True
        elif in_traceback and _EXCEPTION.match(line) and not line.startswith(" "):
            found.append(_with_message(lines, number))
            begin, in_traceback = number, False
    if not found:  # the traceback began before the lines we have
        for number in range(len(lines) - 1, -1, -1):
            match = _EXCEPTION.match(lines[number])
            if match and match[1].rpartition(".")[2].endswith(("Error", "Exception", "Interrupt")):
                below_frames = _PREFIX.sub("", lines[number - 1]).startswith("  ") if number else True
                last = lines[number] in _last_words(lines)
                return [_with_message(lines, number)] if below_frames or last else []
    return found


def _with_message(lines: Sequence[str], number: int) -> str:
    """From the line that names the exception to the end of its message, as far as that can be told."""
    text = [_PREFIX.sub("", lines[number]).rstrip()]
    for line in lines[number + 1 : number + _MESSAGE_LINES]:
        if _TRACEBACK in line or _CHAINED.search(line):
            break
        text.append(_PREFIX.sub("", line).rstrip())
    return "\n".join(text)

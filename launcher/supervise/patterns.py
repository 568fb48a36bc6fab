"""What failures look like in text. The last resort: files and exit codes are asked first."""

from __future__ import annotations

import re
from collections.abc import Iterable

from launcher.spec.verdict import FailureClass

# Order matters: the first class with a match wins. Sources: messages of torch 2.11-2.13, NCCL 2.2x,
# gloo, glibc and the Linux kernel, as they stand in issue reports.
_PATTERNS: tuple[tuple[FailureClass, tuple[str, ...]], ...] = (
    ("user-error", (r"No space left on device", r"Disk quota exceeded")),
    (
        "gpu-oom",
        (
            r"CUDA out of memory",
            r"OutOfMemoryError",
            r"CUDA error: out of memory",
            r"CUBLAS_STATUS_ALLOC_FAILED",
            r"CUDNN_STATUS_ALLOC_FAILED",
            r"NCCL.*[Oo]ut of memory",
            r"HIP out of memory",
        ),
    ),
    (
        "host-oom",
        (
            r"DefaultCPUAllocator: can't allocate memory",
            r"\bMemoryError\b",
            r"std::bad_alloc",
            r"Cannot allocate memory",
            r"DataLoader worker .* is killed by signal: (Killed|Bus error)",
        ),
    ),
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
_EXCEPTION = re.compile(r"^(?:\[rank\d+\]: ?)?((?:[A-Za-z_]\w*\.)*[A-Z]\w*)(?:: (.*))?$")
_TRACEBACK = "Traceback (most recent call last)"


# Exceptions in which torch tells of its network; a ConnectionError is the user's own network.
_NETWORK = frozenset({"nccl-timeout", "rendezvous-failed"})
_NETWORK_EXCEPTION = re.compile(r"(?:[\w.]+\.)?(?:RuntimeError|Dist\w*Error|Rendezvous\w*Error)\b")


def class_of_end(lines: Iterable[str]) -> tuple[FailureClass, str] | None:
    """The class that a program's last lines speak of; a Python exception outranks what came before it."""
    lines = list(lines)
    exception = exception_of(lines)
    if exception is None:
        return class_of_text(lines)
    found = class_of_text([exception])
    if found is not None and found[0] in _NETWORK and not _NETWORK_EXCEPTION.match(exception):
        return None
    return found


def class_of_text(lines: Iterable[str]) -> tuple[FailureClass, str] | None:
    """The class that the lines speak of, and the line that says so."""
    lines = list(lines)
    for name, pattern in _COMPILED:
        for line in reversed(lines):
            if pattern.search(line):
                return name, line.strip()
    return None


def exception_of(lines: Iterable[str]) -> str | None:
    """`Type: message` of the last Python traceback in the lines."""
    found, in_traceback = None, False
    for line in lines:
        if _TRACEBACK in line:
            in_traceback = True
        elif in_traceback and (match := _EXCEPTION.match(line)) and not line.startswith(" "):
            found = f"{match[1]}: {match[2]}" if match[2] else match[1]
            in_traceback = False
    if found is None:  # the traceback began before the lines we have
        for line in reversed(list(lines)):
            match = _EXCEPTION.match(line)
            if match and match[1].rpartition(".")[2].endswith(("Error", "Exception", "Interrupt")):
                return f"{match[1]}: {match[2]}" if match[2] else match[1]
    return found

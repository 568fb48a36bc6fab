"""Writing so that a reader never sees half a file, and nothing else."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from launcher.spec.forms import Form, fits


def beside(path: Path, end: str = "tmp") -> Path:
    """A hidden name in the same folder that nobody else has, for what is to become `path`."""
    # Not by the process id alone: containers and hosts that share the folder have the same ones.
    return path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.{end}")


def replace_text(path: Path, text: str, mode: int = 0o644) -> None:
    """Write `path` whole or not at all; a crash leaves the old content.

    Raises OSError (a full disk, a missing folder); then no temporary file stays behind.
    """
    temporary = beside(path)
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    except OSError as error:
        error.filename = str(path)  # the other name would tell a user nothing
        raise
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def replace_bytes(path: Path, data: bytes) -> None:
    """Write `path` whole or not at all, its folders as well. Without a sync: for what can be made again.

    Raises OSError; then no temporary file stays behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = beside(path)
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def replace_json(path: Path, value: Any) -> None:
    """`replace_text` of readable JSON."""
    replace_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def append_json(path: Path, *values: Any) -> None:
    """Append a line of JSON per value with a single write, so that lines of several writers do not mix.

    Raises OSError on a full disk. A line that was torn then does not spoil the next one.
    """
    lines = "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values).encode()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            lines = b"\n" + lines
        if os.write(descriptor, lines) < len(lines):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)


MAX_RECORD_BYTES = 2**28
"Of one record. A larger file was not written by launcher."


def open_regular(path: Path | str) -> BinaryIO:
    """Open a file for reading. Raises OSError, also for what is no regular file: a named pipe has no end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_json(path: Path) -> Any | None:
    """The content, or None when the file is missing, cannot be read or is not (yet) whole."""
    try:
        with open_regular(path) as file:
            return parsed(file.read(MAX_RECORD_BYTES))
    except OSError:
        return None


def read_record(path: Path, form: Form = dict) -> dict[str, Any]:
    """A JSON object of this form; {} for anything else, so that one broken run does not hide the others."""
    value = read_json(path)
    return value if isinstance(value, dict) and fits(value, form) else {}


def read_json_lines(path: Path, fit: Callable[[object], bool] = lambda _: True) -> list[dict[str, Any]]:
    """Every whole line that is a JSON object and fits; a torn last line (a writer died) is left out."""
    values = []
    with contextlib.suppress(OSError), open_regular(path) as file:
        for line in file:
            value = parsed(line)
            if isinstance(value, dict) and fit(value):
                values.append(value)
    return values


def parsed(data: bytes) -> Any | None:
    """The JSON value, or None for what is none, or is nested too deeply."""
    try:
        return json.loads(data.decode(errors="replace"))
    except (ValueError, RecursionError):
        return None

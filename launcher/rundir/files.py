"""Write files so that a reader never sees half of one, and read them safely."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

from launcher.spec.json_forms import Form, fits


def temporary_name(path: Path, end: str = "tmp") -> Path:
    """A unique hidden name in the same folder, for a file that is to become `path`."""
    # The process id alone is not enough: containers and hosts that share the folder may have the same ids.
    return path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.{end}")


def replace_text(path: Path, text: str, mode: int = 0o644) -> None:
    """Write `path` completely or not at all; a crash leaves the old content.

    Raises OSError (a full disk, a missing folder); then no temporary file is left behind.
    """
    temporary = temporary_name(path)
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            error.filename = str(path)  # the temporary name would not help the user
        raise


def try_lock(file: IO[Any]) -> bool:
    """Take an exclusive lock (flock) on an open file. Return False if another process has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on this file, which is created if it is missing, during the block."""
    with open(path, "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def replace_bytes(path: Path, data: bytes) -> None:
    """Write `path` completely or not at all, and create its folders.

    It is not synced, so it must be replaceable.

    Raises OSError; then no temporary file is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(path)
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def replace_json(path: Path, value: Any) -> None:
    """Write readable JSON with `replace_text`."""
    replace_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def append_json(path: Path, *values: Any) -> None:
    """Append one line of JSON per value with a single write, so that the lines of several writers do not mix.

    Raises OSError on a full disk. A line torn by that does not corrupt the next one.
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
"Maximum size of one record. launcher does not write larger ones."


def open_regular(path: Path | str) -> BinaryIO:
    """Open a regular file for reading. Raises OSError, also for other kinds: a named pipe has no end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_json(path: Path) -> Any | None:
    """The content; None if the file is missing, unreadable or incomplete."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size  # Python allocates as much as it is asked to read
            return parsed(file.read(size)) if size <= MAX_RECORD_BYTES else None
    except OSError:
        return None


def read_record(path: Path, form: Form = dict) -> dict[str, Any]:
    """A JSON object of this form; {} for anything else, so that one broken run does not hide the others."""
    value = read_json(path)
    return value if isinstance(value, dict) and fits(value, form) else {}


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Every complete line that is a JSON object. A torn last line (its writer died) is left out."""
    with contextlib.suppress(OSError), open_regular(path) as file:
        for line in file:
            value = parsed(line)
            if isinstance(value, dict):
                yield value


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return `json_lines` as a list."""
    return list(json_lines(path))


def parsed(data: bytes) -> Any | None:
    """The JSON value; None for invalid or too deeply nested JSON."""
    try:
        return json.loads(data.decode(errors="replace"))
    except (ValueError, RecursionError):
        return None


def delete_folder(path: Path) -> None:
    """Delete a folder and its contents. Its own files, such as run.json, come last: after an interruption it
    is still a run that can be deleted.

    An OSError about a file names the folder, because shutil.rmtree names the file relative to its own folder.
    A link to a folder is refused.
    """
    if path.is_symlink():
        raise NotADirectoryError(errno.ENOTDIR, "it is a symbolic link", str(path))
    try:
        for entry in path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
        shutil.rmtree(path)
    except OSError as error:
        if error.filename is not None:
            error.filename = str(path)
        raise

"""Measure the folders that a run writes to."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from launcher.doctor.measure.guarded import guarded
from launcher.doctor.measure.in_child import in_child
from launcher.doctor.values import Measured

LEAST_BYTES = 2**20
"Enough to see whether a folder is writable."
QUICK_BYTES = 64 * 2**20
THOROUGH_BYTES = 1024 * 2**20
PART_BYTES = 8 * 2**20
LEAST = 16 * 2**20
"Bytes/s. A slower folder gets a smaller file, so that the check takes only seconds."
ANSWER_SECONDS = 12.0
"How long a system call on a folder may take, in addition to reading and writing at LEAST."
FREE_SHARE = 0.25
"Maximum fraction of the free space that the test fills."


def folders_of_run(run: Path, nvme_dir: str | None) -> dict[str, Path]:
    """Return the folders to measure, by their purpose. They may not exist yet."""
    # tempfile.gettempdir() would silently choose another folder if this one is not writable.
    scratch = Path(os.environ.get("TMPDIR") or "/tmp")
    named = {"run folder": run, "checkpoints": run / "checkpoints", "scratch": scratch}
    return {**named, **({"nvme_dir": Path(nvme_dir)} if nvme_dir is not None else {})}


def measure_folders(
    node: int, folders: Mapping[str, Path], most: int, register: Callable[[str], object]
) -> Iterator[Measured]:
    """Yield the values of all folders, once per file system. At most `most` bytes are written to each.

    `register` is called with the path of each file before it is written. A folder that hangs is a finding.
    """
    remaining = dict(folders)
    while remaining:
        result = in_child(
            partial(_measure_each, node, remaining, most, register), ANSWER_SECONDS + 2 * most / LEAST
        )
        yield from result.values
        if not result.error:
            return
        yield Measured("folder", node, str(remaining[result.subject]), result.subject, result.error)
        names = list(remaining)
        remaining = {name: remaining[name] for name in names[names.index(result.subject) + 1 :]}


def _measure_each(
    node: int, folders: Mapping[str, Path], most: int, register: Callable[[str], object]
) -> Iterator[Measured | str]:
    devices = set()
    for name, folder in folders.items():
        yield name
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        if (device := os.stat(existing).st_dev) not in devices:
            devices.add(device)
            yield Measured("folder", node, str(existing), name)
            yield from measure_folder(node, name, existing, most, register)


def measure_folder(
    node: int, name: str, folder: Path, most: int, register: Callable[[str], object]
) -> Iterator[Measured]:
    """Yield the values of one folder. Test files are deleted again."""
    statistics = os.statvfs(folder)
    free = statistics.f_bavail * statistics.f_frsize
    yield Measured("space", node, free, name)
    if statistics.f_files:  # 0 on btrfs and others, which create inodes on demand
        yield Measured("inodes", node, statistics.f_favail, name)
    with ExitStack() as stack:

        def write() -> tuple[Path, float, int]:
            inside = stack.enter_context(tempfile.TemporaryDirectory(prefix=".doctor-", dir=folder))
            register(inside)
            file = Path(inside, "file")
            return file, *_write(file, min(most, int(free * FREE_SHARE)))

        written = guarded("write", node, write, name)
        if written.error:
            yield written
            return
        file, speed, size = written.value
        yield Measured("write", node, round(speed), name)
        yield guarded("read", node, lambda: round(_read(file, size)), name)
        yield guarded("rename", node, lambda: _rename(file.parent), name)
        yield guarded("flock", node, lambda: _flock(file), name)


def _write(file: Path, size: int) -> tuple[float, int]:
    """Write a file and sync it, a part at a time. Return the bytes/s and the number of bytes written."""
    with open(file, "wb", buffering=0) as opened:
        block, written = os.urandom(min(size, PART_BYTES)), 0
        began, until = time.perf_counter(), time.perf_counter() + size / LEAST
        while written < size and time.perf_counter() < until:
            written += opened.write(block[: size - written])
            os.fdatasync(opened.fileno())
    return written / (time.perf_counter() - began), written


def _read(file: Path, size: int) -> float:
    """Return the bytes/s of reading a file, from disk if the kernel drops it from the page cache."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        began, bytes_read = time.perf_counter(), 0
        while bytes_read < size and time.perf_counter() < began + max(1.0, size / LEAST):
            if not (part := os.read(descriptor, 2**20)):
                raise OSError(f"{bytes_read} of {size} bytes could be read back")
            bytes_read += len(part)
        return bytes_read / (time.perf_counter() - began)
    finally:
        os.close(descriptor)


def _rename(folder: Path) -> str:
    old, new = folder / "old", folder / "new"
    old.write_text("old")
    new.write_text("new")
    new.replace(old)
    return "replaces" if old.read_text() == "new" and not new.exists() else "keeps"


def _flock(file: Path) -> str:
    with open(file, "r+b") as locked:  # NFS locks a file exclusively only if it is open for writing
        fcntl.flock(locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return lock_of_another(file)


def lock_of_another(file: Path) -> str:
    """Return whether a lock that another open file holds excludes this process."""
    with open(file, "rb") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return "excludes"
    return "excludes nobody"

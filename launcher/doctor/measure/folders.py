"""Measure the folders that a run writes to."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from launcher.doctor.measure.guarded import guarded
from launcher.doctor.values import Measured

LEAST_BYTES = 2**20
"Enough to see that a folder can be written."
QUICK_BYTES = 64 * 2**20
THOROUGH_BYTES = 1024 * 2**20
PART_BYTES = 8 * 2**20
LEAST = 16 * 2**20
"Bytes/s. A slower folder gets a smaller file, so that the check of a node takes seconds."
FREE_SHARE = 0.25
"Part of the free space that the test may fill."


def folders_of_run(run: Path, nvme_dir: str | None) -> dict[str, Path]:
    """Return the folders to measure by what they are for. Each file system appears once."""
    # tempfile.gettempdir() would silently take another folder if this one is not writable.
    scratch = Path(os.environ.get("TMPDIR") or "/tmp")
    named = {"run folder": run, "checkpoints": run / "checkpoints", "scratch": scratch}
    if nvme_dir is not None:
        named["nvme_dir"] = Path(nvme_dir)
    found: dict[str, Path] = {}
    devices = set()
    for name, folder in named.items():
        at = folder
        while not at.exists() and at != at.parent:
            at = at.parent
        if (device := os.stat(at).st_dev) not in devices:
            devices.add(device)
            found[name] = at
    return found


def measure_folder(node: int, name: str, folder: Path, most: int = QUICK_BYTES) -> Iterator[Measured]:
    """Yield the values of one folder. At most `most` bytes are written and deleted again."""
    yield guarded("space", node, lambda: os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize, name)
    if os.statvfs(folder).f_files:  # btrfs and others make inodes as they are needed
        yield guarded("inodes", node, lambda: os.statvfs(folder).f_favail, name)
    size = min(most, int(os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize * FREE_SHARE))
    with ExitStack() as stack:
        written = guarded("write", node, lambda: stack.enter_context(_written(folder, size)), name)
        if written.error:
            yield written
            return
        file, speed, done = written.value
        yield Measured("write", node, round(speed), name)
        yield guarded("read", node, lambda: round(_read(file, done)), name)
        yield guarded("rename", node, lambda: _rename(folder), name)
        yield guarded("flock", node, lambda: _flock(file), name)


@contextmanager
def _written(folder: Path, size: int) -> Iterator[tuple[Path, float, int]]:
    """Write a file and sync it, a part at a time; give its path, the bytes/s and its size."""
    descriptor, name = tempfile.mkstemp(prefix=".doctor-", dir=folder)
    try:
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            block, done = os.urandom(min(size, PART_BYTES)), 0
            began, until = time.perf_counter(), time.perf_counter() + size / LEAST
            while done < size and time.perf_counter() < until:
                done += file.write(block[: size - done])
                os.fdatasync(file.fileno())
        yield Path(name), done / (time.perf_counter() - began), done
    finally:
        Path(name).unlink(missing_ok=True)


def _read(file: Path, size: int) -> float:
    """Return the bytes/s of reading a file, from the disk if the kernel drops it from its cache."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        began, found = time.perf_counter(), 0
        while part := os.read(descriptor, 2**20):
            found += len(part)
        if found != size:
            raise OSError(f"{found} of {size} bytes could be read back")
        return size / (time.perf_counter() - began)
    finally:
        os.close(descriptor)


def _rename(folder: Path) -> str:
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=folder) as inside:
        old, new = Path(inside, "old"), Path(inside, "new")
        old.write_text("old")
        new.write_text("new")
        new.replace(old)
        return "replaces" if old.read_text() == "new" and not new.exists() else "keeps"


def _flock(file: Path) -> str:
    with open(file, "rb") as one, open(file, "rb") as other:
        fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return "excludes"
    return "excludes nobody"

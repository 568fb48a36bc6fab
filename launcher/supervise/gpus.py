"""Find the free GPUs of this host, and lock them so that two submissions cannot take the same ones.

This file is sent to the host and runs there, so it uses the standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import json
import os
import pwd
import stat
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

FOLDER = Path("/tmp/launcher-gpus")
"Holds one file per GPU, for all users of the host. The process that holds its lock (flock) has the GPU."
BUSY_MIB = 1024
"A GPU with more memory in use is busy, even if nvidia-smi lists no process (another container)."
PATIENCE_SECONDS = 30
"Timeout for nvidia-smi, which wakes every GPU up if persistence mode is off."


class GpusError(Exception):
    """The GPUs cannot be claimed. The message says which are busy, and what uses them."""


class BusyError(GpusError):
    """Too few GPUs are free now, or nvidia-smi does not answer, so waiting may help."""


class UnknownGpusError(GpusError):
    """There are no GPUs to choose from: no nvidia-smi, or the user has hidden all GPUs."""


@dataclass(frozen=True)
class InstalledGpu:
    """A GPU as nvidia-smi lists it, indexed in PCI bus order. Memory in MiB."""

    index: int
    uuid: str
    name: str
    total: int | None
    used: int | None
    busy: str = ""
    "Who uses it; empty if it is free."


def choose(free: Sequence[int], count: int) -> tuple[int, ...] | None:
    """Choose `count` GPUs, adjacent ones if possible: NVLink and PCIe switches connect aligned groups.

    Return None if there are too few.
    """
    ordered = sorted(free)
    groups = [tuple(ordered[at : at + count]) for at in range(len(ordered) - count + 1)]
    return min(groups, key=lambda group: (group[-1] - group[0], group[0] % count, group[0]), default=None)


def short_of(gpus: Sequence[InstalledGpu], count: int) -> str:
    """Return why `count` GPUs cannot be claimed, or "" if they can."""
    free = [gpu for gpu in gpus if not gpu.busy]
    if len(free) >= count:
        return ""
    busy = "; ".join(f"GPU {gpu.index}: {gpu.busy}" for gpu in gpus if gpu.busy)
    counts = f"{len(free)} of {len(gpus)} GPUs are free" if busy else f"there are {len(gpus)} GPUs"
    return f"{counts}, the job needs {count}" + (f" ({busy})" if busy else "")


def installed() -> list[tuple[str, int | None]]:
    """Return name and memory in MiB of each GPU. Raises GpusError."""
    rows = [row.rsplit(", ", 1) for row in _ask("--query-gpu=name,memory.total")]
    return [(name, _number(total)) for name, total in rows]


def user() -> str:
    """Return the name of this process's user, or its uid if it has no name, as in some containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # until Python 3.12, since 3.13
        return str(os.getuid())


def survey() -> list[InstalledGpu]:
    """Return all GPUs, with who uses or has locked each. Raises GpusError."""
    with _choosing():
        gpus = _installed_gpus()
        holders, locks = _lock([gpu for gpu in gpus if not gpu.busy])
        for lock in locks.values():
            os.close(lock)
    return [replace(gpu, busy=gpu.busy or holders.get(gpu.index, "")) for gpu in gpus]


def claim(
    count: int, who: Mapping[str, str], *, among: str | None = None, shared: bool = False
) -> tuple[tuple[int, ...], list[int]]:
    """Lock `count` free GPUs.

    `among` limits the choice, in the form of CUDA_VISIBLE_DEVICES; "" allows none. If `shared`, GPUs that
    programs other than launcher use are taken when there are too few others. Return the indexes, and open
    files that hold the locks while any process has them open.

    Raises BusyError if waiting helps, UnknownGpusError if there is nothing to choose from, and GpusError.
    """
    with _choosing():
        gpus = [gpu for gpu in _installed_gpus() if among is None or _is_visible(gpu, among)]
        if among is not None and not gpus:
            raise UnknownGpusError(f"CUDA_VISIBLE_DEVICES={among} names no GPU of this machine")
        holders, locks = _lock([gpu for gpu in gpus if shared or not gpu.busy])
        quiet = [gpu.index for gpu in gpus if gpu.index in locks and not gpu.busy]
        chosen = choose(quiet, count) or choose(list(locks), count)
        for index, lock in locks.items():
            if index not in (chosen or ()):
                os.close(lock)
    if chosen is None:
        gpus_now = [replace(gpu, busy=gpu.busy or holders.get(gpu.index, "")) for gpu in gpus]
        raise (BusyError if len(gpus) >= count else GpusError)(short_of(gpus_now, count))
    for index in chosen:
        os.ftruncate(locks[index], 0)
        os.pwrite(locks[index], json.dumps(dict(who)).encode(), 0)
    return chosen, [locks[index] for index in chosen]


def _installed_gpus() -> list[InstalledGpu]:
    rows = _ask("--query-gpu=index,uuid,name,memory.total,memory.used")
    busy: dict[str, list[str]] = {}
    for line in _ask("--query-compute-apps=gpu_uuid,pid,process_name,used_memory"):
        uuid, pid, rest = line.split(", ", 2)
        name, _, used = rest.rpartition(", ")
        busy.setdefault(uuid, []).append(_process(pid, name, used))
    return [_parsed(row, busy) for row in rows]


def _parsed(row: str, busy: Mapping[str, Sequence[str]]) -> InstalledGpu:
    index, uuid, name, total, used = row.split(", ")
    gpu = InstalledGpu(int(index), uuid, name, _number(total), _number(used))
    if uuid in busy:
        return replace(gpu, busy=", ".join(busy[uuid]))
    if (gpu.used or 0) > BUSY_MIB:
        return replace(gpu, busy=f"{gpu.used} MiB in use by a process that is not visible here")
    return gpu


def _process(pid: str, name: str, used: str) -> str:
    try:
        owner = f" of {pwd.getpwuid(os.stat(f'/proc/{pid}').st_uid).pw_name}"
    except (OSError, KeyError):
        owner = ""
    memory = f", {used} MiB" if _number(used) is not None else ""
    return f"{Path(name).name} (process {pid}{owner}{memory})"


def _number(text: str) -> int | None:
    """Return an int, or None for texts such as `[N/A]`."""
    return int(text) if text.isdigit() else None


def _ask(query: str) -> list[str]:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    except FileNotFoundError:
        raise UnknownGpusError(
            "there is no nvidia-smi, so launcher does not know which GPUs are free"
        ) from None
    except OSError as error:
        raise GpusError(f"nvidia-smi: {error.strerror}") from None
    try:
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()  # not waited for: a process that waits for a GPU's driver may never end
        raise BusyError(f"nvidia-smi gave no answer in {PATIENCE_SECONDS} s: a GPU may hang") from None
    if process.returncode:
        lines = (out + err).strip().splitlines()
        raise BusyError(f"nvidia-smi: {lines[0] if lines else f'exit code {process.returncode}'}")
    return [line.strip() for line in out.splitlines() if ", " in line]


def _lock(gpus: Sequence[InstalledGpu]) -> tuple[dict[int, str], dict[int, int]]:
    """Lock the GPUs that are free. Return index -> holder of the others, and index -> open lock file."""
    holders, locks = {}, {}
    for gpu in gpus:
        lock = _open(gpu.uuid)
        if _flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
            locks[gpu.index] = lock
        else:
            holders[gpu.index] = _holder(os.pread(lock, 1000, 0))
            os.close(lock)
    return holders, locks


def _holder(record: bytes) -> str:
    try:
        who = json.loads(record)
        text = f"taken by launcher's run {who['run']} of {who['user']}"
    except (ValueError, KeyError, TypeError):
        text = "taken by another run of launcher's"
    return "".join(char for char in text if char.isprintable())[:200]


def _is_visible(gpu: InstalledGpu, visible: str) -> bool:
    names = [name.strip() for name in visible.split(",")]
    return str(gpu.index) in names or any(name and gpu.uuid.startswith(name) for name in names)


@contextlib.contextmanager
def polling() -> Iterator[bool]:
    """Yield whether this process may query nvidia-smi. One waiting run of a host queries it at a time."""
    file = _open(".polling")
    try:
        yield _flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(file)


@contextlib.contextmanager
def _choosing() -> Iterator[None]:
    """Hold the lock under which one submission at a time inspects and locks GPUs."""
    lock = _open(".choosing")
    try:
        _flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _flock(file: int, kind: int) -> bool:
    """Return False if another process has the lock. Raises GpusError."""
    try:
        fcntl.flock(file, kind)
    except BlockingIOError:
        return False
    except OSError as error:  # such as ENOLCK, where FOLDER is on a network file system
        why = f"{FOLDER}, which holds the locks of GPUs, cannot be locked: {error.strerror}"
        raise GpusError(why) from None
    return True


def _open(name: str) -> int:
    """Open a file that every user may write. The kernel may refuse O_CREAT for a file of another user."""
    try:
        with contextlib.suppress(FileExistsError):
            FOLDER.mkdir()
            FOLDER.chmod(0o1777)
        path = FOLDER / Path(name).name
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
            os.fchmod(file, 0o666)
        except FileExistsError:
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError as error:
        raise GpusError(f"{FOLDER}, which holds the locks of GPUs: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise GpusError(f"{FOLDER}/{name} is not a regular file")
    return file

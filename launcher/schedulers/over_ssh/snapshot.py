"""The job's code as it is now, named by its content: what was sent once is not sent again."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.schedulers.base import SchedulerError
from launcher.schedulers.over_ssh import rsh
from launcher.schedulers.over_ssh.ssh import Over
from launcher.spec.base import format_bytes

LIMIT = 256 * 2**20
"Bytes of a working directory: code is far below; data belongs on the cluster's own disks."
SHOWN = 5
FOLDER = ".code"
"Below the folder of the runs on the cluster: one folder for each snapshot."
MISSING = "the job's code is not there (any more): snapshot"
SEND_SECONDS = 600.0


class SnapshotError(SchedulerError):
    """The working directory cannot be sent; the message names the files."""


@dataclass(frozen=True)
class Entry:
    """A file or a symbolic link. `path` is relative to the working directory."""

    path: str
    size: int
    executable: bool
    link: str | None
    seen: tuple[int, int, int, int]
    "Device, inode, mtime and ctime in ns when it was read: whether it was written since."


@dataclass(frozen=True)
class Snapshot:
    root: Path
    entries: tuple[Entry, ...]
    digest: str
    "Of every path, executable bit, link and content."

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.entries)


def take(workdir: Path, leave_out: Sequence[Path] = ()) -> Snapshot:
    """Uncommitted work included; what git ignores and what this process writes its output to left out. Raises
    SnapshotError, OSError."""
    ours = [
        path for path in _files(workdir) if not any((workdir / path).is_relative_to(p) for p in leave_out)
    ]
    output = _output()
    entries = tuple(
        entry
        for path in sorted(set(ours))
        if (entry := _entry(workdir, path)) is not None and entry.seen[:2] not in output
    )
    _check(workdir, entries)
    total = hashlib.sha256()
    for entry in entries:
        content = "" if entry.link is not None else _sha256(workdir / entry.path)
        for part in (entry.path, "x" if entry.executable else "-", entry.link or "", content):
            total.update(os.fsencode(part) + b"\0")
    return Snapshot(workdir, entries, total.hexdigest()[:20])


def place(runs: str, digest: str) -> str:
    """Where a snapshot lies on the cluster."""
    return f"{runs}/{FOLDER}/{digest}"


def adopt(runs: str, digest: str) -> str:
    """Shell: what `send` has brought becomes the snapshot, at once. Fails when it is not there."""
    final, partial = rsh.quote(place(runs, digest)), rsh.quote(place(runs, f".{digest}.partial"))
    missing = rsh.quote(f"{MISSING} {digest}")
    return (
        f"{{ [ -d {final} ] || mv -T {partial} {final} 2>/dev/null || [ -d {final} ] "
        f"|| {{ echo {missing}; false; }}; }} && touch {final}"
    )


def send(snapshot: Snapshot, login: Over, runs: str, before: str | None = None) -> None:
    """Over the connection that is open, in one session; files that are equal in the snapshot `before` are
    linked there. It is no snapshot yet: that is `adopt`'s. Raises SnapshotError, LoginError."""
    partial = f".{snapshot.digest}.partial"
    folder = rsh.quote(f"{runs}/{FOLDER}")
    prepare = f"umask 077; mkdir -p {folder} && cd {folder} || exit 73; "
    command = ["rsync", "--secluded-args", "--links", "--perms", "--checksum", "--from0", "--files-from=-"]
    command += ["--chmod=Du=rwx,Fu=rX"]  # what runs share is not written to
    if before is not None and before != snapshot.digest:
        command.append(f"--link-dest=../{before}")
    command += [f"{snapshot.root}/", f"login:{partial}/"]
    names = b"".join(os.fsencode(entry.path) + b"\0" for entry in snapshot.entries)
    environment = rsh.environment(login.command(), prepare)
    try:
        done = subprocess.run(
            command, input=names, capture_output=True, env=environment, timeout=SEND_SECONDS
        )
    except FileNotFoundError:
        raise SnapshotError("there is no `rsync` here; install it: it sends the job's code") from None
    except subprocess.TimeoutExpired:
        raise SnapshotError(
            f"the job's code ({format_bytes(snapshot.size)}) was not sent to {login.name} within "
            f"{SEND_SECONDS:.0f} s; what has arrived is kept: submit again"
        ) from None
    if done.returncode:
        raise SnapshotError(f"the job's code was not sent to {login.name}: {_said(done, runs)}")
    changed = [entry.path for entry in snapshot.entries if _entry(snapshot.root, entry.path) != entry]
    if changed:
        raise SnapshotError(
            f"{snapshot.root}: {', '.join(changed[:SHOWN])} changed while being sent; submit again, "
            "or name in .gitignore what is written meanwhile and is not code"
        )


def _output() -> set[tuple[int, int]]:
    """Device and inode of stdout and stderr: `launcher submit ... > log` writes in there until it ends."""
    found = set()
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):  # closed
            now = os.fstat(descriptor)
            found.add((now.st_dev, now.st_ino))
    return found


def _files(folder: Path) -> Iterator[str]:
    listed = _listed_by_git(folder)
    if listed is None:
        yield from _walked(folder)
        return
    for path in listed:
        whole = folder / path
        if whole.is_dir() and not whole.is_symlink():  # a repository in the repository
            yield from (f"{path.rstrip('/')}/{below}" for below in _files(whole))
        else:
            yield path


def _listed_by_git(folder: Path) -> list[str] | None:
    """None where no git knows the folder."""
    command = ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, capture_output=True)
    except FileNotFoundError:
        return None
    if done.returncode == 0:  # a folder that git ignores is somebody's choice all the same
        return [os.fsdecode(name) for name in done.stdout.split(b"\0") if name] or None
    said = done.stderr.decode(errors="replace").strip()
    if "not a git repository" in said:
        return None
    raise SnapshotError(f"{folder}: git cannot list its files: {said}")


def _walked(folder: Path) -> Iterator[str]:
    """Everything but what Python makes by itself, and folders that ignore themselves."""
    for path, folders, names in os.walk(folder):
        here = Path(path)
        links = [name for name in folders if (here / name).is_symlink()]
        folders[:] = [
            name
            for name in folders
            if name not in (".git", "__pycache__")
            and not (here / name / "pyvenv.cfg").exists()
            and not _ignores_itself(here / name)
        ]
        for name in [*names, *links]:
            yield str((here / name).relative_to(folder))


def _ignores_itself(folder: Path) -> bool:
    """As caches of tools and the sandbox of RunPod do, for git; where there is none it means the same."""
    try:
        lines = (folder / ".gitignore").read_bytes().split(b"\n")
    except OSError:
        return False
    return [line.strip() for line in lines if line.strip() and not line.startswith(b"#")] == [b"*"]


def _entry(root: Path, path: str) -> Entry | None:
    """None for what was deleted, and for what is neither a file nor a link."""
    try:
        found = os.lstat(root / path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    seen = (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns)
    if stat.S_ISLNK(found.st_mode):
        return Entry(path, 0, False, str((root / path).readlink()), seen)
    if not stat.S_ISREG(found.st_mode):
        return None
    return Entry(path, found.st_size, bool(found.st_mode & stat.S_IXUSR), None, seen)


def _check(workdir: Path, entries: Sequence[Entry]) -> None:
    if not entries:
        raise SnapshotError(f"{workdir}: there is no file to send")
    outside = [f"{entry.path} -> {entry.link}" for entry in entries if _leads_out(entry)]
    if outside:
        raise SnapshotError(
            f"{workdir}: links that lead out of it lead nowhere on the cluster: "
            f"{', '.join(outside[:SHOWN])}{_more(outside)}; name them in .gitignore, or copy what they mean"
        )
    size = sum(entry.size for entry in entries)
    if size > LIMIT:
        largest = sorted(entries, key=lambda entry: -entry.size)[:SHOWN]
        named = ", ".join(f"{entry.path} ({format_bytes(entry.size)})" for entry in largest)
        raise SnapshotError(
            f"{workdir}: {format_bytes(size)} in {len(entries)} files would be sent, at most "
            f"{format_bytes(LIMIT)} are; the largest: {named}. Name what is not code in .gitignore, and put "
            f"data on the cluster's own disks"
        )


def _leads_out(entry: Entry) -> bool:
    if entry.link is None:
        return False
    target = os.path.normpath(Path(entry.path).parent / entry.link)
    return target.startswith(("/", "../")) or target == ".."


def _more(names: Sequence[str]) -> str:
    return f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""


def _sha256(path: Path) -> str:
    total = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            total.update(block)
    return total.hexdigest()


def _said(done: subprocess.CompletedProcess[bytes], runs: str) -> str:
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    said = lines[0] if lines else f"rsync ended with exit code {done.returncode}"
    if "not found" in done.stderr.decode(errors="replace"):
        return f"there is no `rsync` there ({said})"
    return f"{said} (paths.runs is {runs})" if runs in said else said

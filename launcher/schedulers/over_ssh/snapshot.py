"""Snapshots of the job's code, named by their content, so that each is sent only once."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from launcher.rundir.find import default_root
from launcher.schedulers.base import Request
from launcher.schedulers.login import Login
from launcher.schedulers.over_ssh import rsh
from launcher.schedulers.over_ssh.code_files import SnapshotError, code_files
from launcher.schedulers.over_ssh.ssh import SshLogin
from launcher.spec.listed_names import listed
from launcher.spec.progress import working
from launcher.spec.quantities import format_bytes

LIMIT = 256 * 2**20
"Maximum bytes of a working directory. Code is far smaller; data belongs on the cluster's own disks."
SHOWN = 5
FOLDER = ".code"
"Folder in the runs' root on the cluster, with one folder per snapshot."
MISSING = "the job's code is not there (any more): snapshot"
SEND_SECONDS = 600.0


@dataclass(frozen=True)
class Entry:
    """A file or a symbolic link. `path` is relative to the working directory."""

    path: str
    size: int
    mode: int
    "Permissions, e.g. 0o644."
    link: str | None
    stat: tuple[int, int, int, int]
    "Device, inode, mtime and ctime in ns when it was read. They show whether it was written since."


@dataclass(frozen=True)
class Snapshot:
    """The code of a job at one moment."""

    root: Path
    entries: tuple[Entry, ...]
    digest: str
    "Hash of every path, its permissions, link and content."
    left_out: tuple[str, ...] = ()
    "Files that are not sent because they look like secrets."

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user before the snapshot is sent."""
        if not self.left_out:
            return ()
        named = f"{listed(self.left_out, SHOWN)}"
        return (
            f"not sent with the code, because their names look like secrets: {named}; pass a secret with "
            "`secrets:`, or list a file in the job's `send:` to send it anyway",
        )

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.entries)


def of_request(request: Request) -> Snapshot:
    """Return the code of a job as it is now, without the runs in it. Raises SchedulerError, OSError."""
    workdir = request.existing_workdir()
    secret = [
        Path(os.path.expanduser(item.file))  # noqa: PTH111 (Path's raises if there is no home directory)
        for item in request.job.secrets
        if item.file is not None
    ]
    with working(f"reading the job's code in {workdir}"):
        return take(workdir, [default_root().resolve()], request.job.send, secret)


def take(
    workdir: Path, leave_out: Sequence[Path] = (), send: Sequence[str] = (), secret: Sequence[Path] = ()
) -> Snapshot:
    """Take a snapshot of the working directory, including uncommitted work.

    Leaves out what git ignores, what looks like a secret (see `code_files`) and what this process writes its
    output to. Raises SnapshotError, OSError.
    """
    files, held_back = code_files(workdir, send, secret)
    ours = [path for path in files if not any((workdir / path).is_relative_to(p) for p in leave_out)]
    held_back = [path for path in held_back if not any((workdir / path).is_relative_to(p) for p in leave_out)]
    output = _output()
    entries = tuple(
        entry
        for path in ours
        if (entry := _entry(workdir, path)) is not None and entry.stat[:2] not in output
    )
    _check(workdir, entries)
    total = hashlib.sha256()
    for entry in entries:
        content = "" if entry.link is not None else _sha256(workdir / entry.path)
        for part in (entry.path, f"{entry.mode:o}", entry.link or "", content):
            total.update(os.fsencode(part) + b"\0")
    return Snapshot(workdir, entries, total.hexdigest()[:20], tuple(held_back))


def place(runs: str, digest: str) -> str:
    """Return the snapshot's folder on the cluster."""
    return f"{runs}/{FOLDER}/{digest}"


def adopt(runs: str, digest: str) -> str:
    """Return shell that atomically turns the copy of `send` into the snapshot. Fails if there is no copy."""
    final, partial = quote(place(runs, digest)), quote(place(runs, f".{digest}.partial"))
    missing = quote(f"{MISSING} {digest}")
    return (
        f"{{ [ -d {final} ] || mv -T {partial} {final} 2>/dev/null || [ -d {final} ] "
        f"|| {{ echo {missing}; false; }}; }} && touch {final}"
    )


def send(snapshot: Snapshot, login: SshLogin, runs: str, before: str | None = None) -> None:
    """Copy the snapshot through the open connection, in one session. `adopt` then makes it complete.

    Files that are equal in the snapshot `before` are linked there. Raises SnapshotError, LoginError.
    """
    partial = f".{snapshot.digest}.partial"
    folder = quote(f"{runs}/{FOLDER}")
    prepare = f"umask 077; mkdir -p {folder} && cd {folder} || exit 73; "
    command = ["rsync", "--secluded-args", "--links", "--perms", "--checksum", "--from0", "--files-from=-"]
    command += ["--chmod=Du=rwx,Fu=rX"]  # runs share the files, so they are read-only
    if before is not None and before != snapshot.digest:
        command.append(f"--link-dest=../{before}")
    command += [f"{snapshot.root}/", f"login:{partial}/"]
    names = b"".join(os.fsencode(entry.path) + b"\0" for entry in snapshot.entries)
    environment = rsh.environment(login.command(), prepare)
    try:
        with working(f"sending the job's code ({format_bytes(snapshot.size)}) to {login.name}"):
            done = subprocess.run(
                command, input=names, capture_output=True, env=environment, timeout=SEND_SECONDS
            )
    except FileNotFoundError:
        raise SnapshotError("there is no `rsync` here; install it to send the job's code") from None
    except subprocess.TimeoutExpired:
        raise SnapshotError(
            f"the job's code ({format_bytes(snapshot.size)}) was not sent to {login.name} within "
            f"{SEND_SECONDS:.0f} s; what has arrived is kept: submit again"
        ) from None
    if done.returncode:
        raise SnapshotError(f"the job's code was not sent to {login.name}: {_message(done, runs)}")
    changed = [entry.path for entry in snapshot.entries if _entry(snapshot.root, entry.path) != entry]
    if changed:
        raise SnapshotError(
            f"{snapshot.root}: {', '.join(changed[:SHOWN])} changed while being sent; submit again. "
            "If they are not code, name them in .gitignore or .launcherignore"
        )


def relay(digest: str, source: Login, to: Login, runs: str) -> None:
    """Copy a snapshot from one host to another through this machine, unless it is there.

    Raises SnapshotError, LoginError.
    """
    target = quote(place(runs, digest))
    if to.run(f"[ -d {target} ]").returncode == 0:
        return
    packed = source.run(f"tar -C {target} -cf - .", timeout=SEND_SECONDS)
    if packed.returncode:
        raise SnapshotError(f"the job's code was not read from {source.name}: {_message(packed, runs)}")
    partial = quote(place(runs, f".{digest}.{secrets.token_hex(4)}"))
    script = (
        f"umask 077; mkdir -p {partial} && {rsh.unpack(len(packed.stdout), partial, '-xpf')} && "
        f"{{ mv -T {partial} {target} || [ -d {target} ]; }}; code=$?; rm -rf {partial}; exit $code"
    )
    done = to.run(script, stdin=packed.stdout, timeout=SEND_SECONDS)
    if done.returncode:
        raise SnapshotError(f"the job's code was not written to {to.name}: {_message(done, runs)}")


def _output() -> set[tuple[int, int]]:
    """Return device and inode of stdout and stderr: `launcher submit ... > log` writes into its log."""
    files = set()
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):  # closed
            status = os.fstat(descriptor)
            files.add((status.st_dev, status.st_ino))
    return files


def _entry(root: Path, path: str) -> Entry | None:
    """Return the entry of a path, or None if it was deleted, or is neither a file nor a link."""
    try:
        status = os.lstat(root / path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    version = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
    if stat.S_ISLNK(status.st_mode):
        return Entry(path, 0, 0o777, str((root / path).readlink()), version)
    if not stat.S_ISREG(status.st_mode):
        return None
    return Entry(path, status.st_size, status.st_mode & 0o777, None, version)


def _check(workdir: Path, entries: Sequence[Entry]) -> None:
    if not entries:
        raise SnapshotError(f"{workdir}: there is no file to send")
    outside = [f"{entry.path} -> {entry.link}" for entry in entries if _leads_out(entry)]
    if outside:
        raise SnapshotError(
            f"{workdir}: these links point outside of it and would be broken on the cluster: "
            f"{listed(outside, SHOWN)}; name them in .gitignore or .launcherignore, or "
            "replace them by copies"
        )
    size = sum(entry.size for entry in entries)
    if size > LIMIT:
        largest = sorted(entries, key=lambda entry: -entry.size)[:SHOWN]
        named = ", ".join(f"{entry.path} ({format_bytes(entry.size)})" for entry in largest)
        raise SnapshotError(
            f"{workdir}: {format_bytes(size)} in {len(entries)} files is more than the limit of "
            f"{format_bytes(LIMIT)}; the largest: {named}. Name what is not code in .gitignore or "
            ".launcherignore, and put data on the cluster's own disks"
        )


def _leads_out(entry: Entry) -> bool:
    if entry.link is None:
        return False
    target = os.path.normpath(Path(entry.path).parent / entry.link)
    return target.startswith(("/", "../")) or target == ".."


def _sha256(path: Path) -> str:
    total = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            total.update(block)
    return total.hexdigest()


def _message(done: subprocess.CompletedProcess[bytes], runs: str) -> str:
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    message = lines[0] if lines else f"exit code {done.returncode}"
    if "not found" in done.stderr.decode(errors="replace"):
        return f"there is no `rsync` there ({message})"
    return f"{message} (paths.runs is {runs})" if runs in message else message

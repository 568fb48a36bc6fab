"""Local copies of run directories on a host, kept up to date.

Changes of either side travel with every query in the same round trip. Readers use the copy like any run
directory.
"""

from __future__ import annotations

import io
import json
import os
import re
import secrets
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath

from launcher.rundir.file_table import DELETED, GROWING, SENT, expression
from launcher.rundir.files import locked, read_record, replace_bytes
from launcher.rundir.layout import RunDir
from launcher.schedulers.base import SchedulerError
from launcher.schedulers.local_copies import files_of, is_below, is_state, keep_checkpoints, private_folder
from launcher.schedulers.login import CutError, Login
from launcher.schedulers.over_ssh import exchange
from launcher.schedulers.over_ssh.exchange import UNSEEN, Changes, Piece, RoundTrip, SyncedFile
from launcher.schedulers.wanted_files import Wanted

INDEX = ".mirror.json"
"File in the copy of a run that lists its files as of the last round trip."
SLOWEST = 2**18
"Bytes per second assumed for sending, which sets the timeout. A sweep sends many runs."
_MODE = 0o755


class RefusedError(SchedulerError):
    """Local changes could not be written on the host."""


class ChangedThereError(RefusedError):
    """Local changes were not written because the host has changed the same file."""


class Mirrored:
    """A Login whose round trips synchronise the selected runs.

    Local changes are sent first, then the script runs, then the host's changes are fetched.
    """

    def __init__(self, login: Login, local_root: Path, remote_root: str) -> None:
        self.login, self.local_root, self.remote_root = login, local_root, remote_root
        self.name = login.name
        self.first = ""
        "Shell that must succeed before anything else is done."
        self.strict = False
        "Whether to do nothing if local changes cannot be written or the host has changed the same files."
        self.lost: set[str] = set()
        "Runs whose directory no longer exists on the host."
        self._unanswered = False
        "Whether the last answer was lost, so that the host may or may not have the local changes."
        self._invalid: Counter[str] = Counter()
        "Path of a state.json -> number of invalid versions since the last valid one."
        self._runs: list[str] = []
        self._wanted = Wanted()

    def choose(self, runs: Iterable[RunDir], wanted: Wanted | None = None) -> None:
        """Choose what the next round trips fetch; by default the records without any rank's output."""
        self._runs, self._wanted = [run.id for run in runs], wanted or Wanted()

    def _refetch_or_report(self, path: str, trip: RoundTrip) -> None:
        """Fetch an invalid state.json again, because it may have been replaced meanwhile; then report it."""
        self._invalid[path] += 1
        if self._invalid[path] == 1:
            trip.more = True
        elif self._invalid[path] == 2:
            where = f"{self.remote_root}/{path} on {self.name} is not a valid state of a run"
            print(f"{where}; the previous one is kept", file=sys.stderr)

    def run(
        self, script: str, *, stdin: bytes = b"", timeout: float = 60.0
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a script. Raises LoginError, and RefusedError if `strict`; in that case it has not run."""
        if self.strict and self._unanswered:  # local changes that have arrived would look like the host's
            self._exchange(":", b"", timeout)
        try:
            done = self._exchange(script, stdin, timeout, strict=self.strict)
        except RefusedError:
            if self.strict:
                raise
            done = self._exchange(script, stdin, timeout, send=False)
        has_more = done.more
        while has_more:  # after a long absence the data comes in parts, to limit memory
            has_more = self._exchange(":", b"", timeout).more
        return done.answer

    def has_sent(self, file: Path) -> bool:
        """Return whether the host has the local version of `file`, which is at the top of a run directory."""
        synced = _read_index(file.parent).get(file.name)
        return synced is not None and synced.local_time == file.stat().st_mtime_ns

    def _exchange(
        self, script: str, stdin: bytes, timeout: float, *, send: bool = True, strict: bool = False
    ) -> RoundTrip:
        mark = secrets.token_hex(8)
        # Two processes would both send what neither has sent yet.
        with locked(private_folder(self.local_root) / ".lock"):
            index = {run: _read_index(self.local_root / run) for run in self._runs}
            changes, sent = _changes(self.local_root, index)
            if not send:
                changes = Changes()
            parcel = _parcel(self.local_root, changes) if changes else b""
            synced = _expected(self.local_root, index, changes)
            if not send:  # the host keeps the versions that it has
                sent = {path: (synced[path].size, synced[path].local_time) for path in sent if path in synced}
            text = exchange.shell_text(
                mark,
                self.remote_root,
                self.first,
                changes,
                len(parcel),
                script,
                self._runs,
                synced,
                self._wanted,
                strict,
            )
            patience = timeout + len(parcel) / SLOWEST
            self._unanswered = True
            done = self.login.run(text, stdin=parcel + stdin, timeout=patience)
            try:
                trip = exchange.parse(done, mark)
            except exchange.IncompleteAnswerError as error:
                raise CutError(f"{self.name}: {error}") from None
            self._unanswered = False
            if trip.refused is not None:
                kind = ChangedThereError if trip.changed_there else RefusedError
                raise kind(f"nothing was done on {self.name}: {trip.refused}")
            self._apply(trip, index, synced, sent)
        return trip

    def _apply(
        self,
        trip: RoundTrip,
        before: Mapping[str, Mapping[str, SyncedFile]],
        synced: Mapping[str, SyncedFile],
        sent: Mapping[str, tuple[int, int]],
    ) -> None:
        """Write what was fetched.

        Whatever the host sends, only files below the requested runs are written.
        """
        self.lost = trip.lost
        new_index: dict[str, dict[str, SyncedFile]] = {run: {} for run in self._runs}
        for path, was in synced.items():
            run, _, name = path.partition("/")
            new_index[run][name] = was
        checkpoints: dict[str, set[str]] = {run: set() for run in self._runs}
        for piece in trip.pieces:
            run, _, name = piece.path.partition("/")
            if run not in new_index or run in trip.lost or not is_below(name):
                continue
            file = self.local_root / run / name
            untouched = not file.exists() or sent.get(piece.path, (0, 0))[1] in (0, file.stat().st_mtime_ns)
            if piece.kind == "gone" and untouched:
                file.unlink(missing_ok=True)
                new_index[run].pop(name, None)
            elif piece.kind == "folder":
                checkpoints[run].add(file.name)
            elif piece.kind == "same":
                new_index[run][name] = replace(new_index[run][name], inode=piece.inode, time=piece.time)
            elif piece.kind == "end":
                new_index[run][name] = _write_end(file, piece, sent.get(piece.path))
            elif name == "state.json" and piece.kind == "whole" and not is_state(piece.data):
                self._refetch_or_report(piece.path, trip)
            elif piece.kind == "whole" and untouched:
                self._invalid.pop(piece.path, None)
                new_index[run][name] = _write_whole(file, piece)
        for run in set(self._runs) - trip.lost:
            keep_checkpoints(RunDir(self.local_root / run), checkpoints[run])
            if new_index[run] != before[run] or not (self.local_root / run / INDEX).exists():
                _write_index(self.local_root / run, new_index[run])


def forget(run: RunDir) -> None:
    """Delete the index of a run, so that the next round trip sends all of it."""
    (run.path / INDEX).unlink(missing_ok=True)


def packed(run: Path, names: Iterable[str]) -> bytes:
    """Return a tar of these files and folders of a run directory, as far as they exist."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in names:
            if (run / name).exists():
                tar.add(run / name, name, filter=_anonymous)
    return out.getvalue()


def _changes(
    local_root: Path, index: Mapping[str, Mapping[str, SyncedFile]]
) -> tuple[Changes, dict[str, tuple[int, int]]]:
    """Return the local changes, and path -> (size, time in ns) of each file that is sent if it changes."""
    changes, versions = Changes(), dict[str, tuple[int, int]]()
    for run, synced in index.items():
        names = files_of(local_root / run, SENT)
        for name in names:
            path, before, now = f"{run}/{name}", synced.get(name), (local_root / run / name).stat()
            versions[path] = now.st_size, now.st_mtime_ns
            if not synced:
                continue  # the run is sent as a whole
            if before is None:
                changes.written[path] = None
            elif before.local_time == now.st_mtime_ns:
                continue
            elif not name.endswith(GROWING):
                changes.written[path] = before
            elif now.st_size > before.size:
                changes.grown[path] = before.size
        if not synced and (local_root / run / "run.json").is_file():
            changes.new.append(run)
        for name in synced:
            if name not in names and any(re.fullmatch(expression(one), name) for one in DELETED):
                changes.removed[f"{run}/{name}"] = synced[name]
    return changes, versions


def _parcel(local_root: Path, changes: Changes) -> bytes:
    """Return a tar of the changes. A file that has grown is sent from its old end."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for run in changes.new:
            tar.add(local_root / run, run, filter=_anonymous)
        for path, start in changes.grown.items():
            _add(tar, local_root, path, start)
        for path in changes.written:
            _add(tar, local_root, path)
    return out.getvalue()


def _anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Drop user and group names, and write permissions for others. Leave out the index."""
    info.uid = info.gid = 0
    info.mode &= _MODE
    info.uname = info.gname = ""
    return None if PurePosixPath(info.name).name == INDEX else info


def _add(tar: tarfile.TarFile, local_root: Path, path: str, start: int = 0) -> None:
    data, now = (local_root / path).read_bytes()[start:], (local_root / path).stat()
    info = tarfile.TarInfo(path)
    info.size, info.mode, info.mtime = len(data), now.st_mode & _MODE, int(now.st_mtime)
    tar.addfile(info, io.BytesIO(data))


def _expected(
    local_root: Path, index: Mapping[str, Mapping[str, SyncedFile]], changes: Changes
) -> dict[str, SyncedFile]:
    """Return the files on the host once the local changes are applied. Equal files need not be fetched."""
    synced = {f"{run}/{name}": file for run, files in index.items() for name, file in files.items()}
    for run in changes.new:
        for name in files_of(local_root / run, ["**/*"]):
            synced[f"{run}/{name}"] = _sent(local_root / run / name)
    for path, before in changes.written.items():
        if before is None:
            synced[path] = _sent(local_root / path)
    return {path: file for path, file in synced.items() if path not in changes.removed}


def _sent(file: Path) -> SyncedFile:
    now = file.stat()
    return SyncedFile(UNSEEN, now.st_size, "-", now.st_mtime_ns)


def _write_end(file: Path, piece: Piece, sent: tuple[int, int] | None) -> SyncedFile:
    """Append what the host has appended.

    Text appended here since the round trip began stays after it and is sent next time.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "r+b" if file.exists() else "w+b") as to:
        to.seek(sent[0] if sent is not None else 0, os.SEEK_SET if sent is not None else os.SEEK_END)
        unsent = to.read()
        to.seek(piece.offset)
        to.write(piece.data + unsent)
        to.truncate()
    size = piece.offset + len(piece.data)
    return SyncedFile(piece.inode, size, piece.time, 0 if unsent else file.stat().st_mtime_ns)


def _write_whole(file: Path, piece: Piece) -> SyncedFile:
    replace_bytes(file, piece.data)
    whole = len(piece.data) == piece.size  # otherwise it changed while it was read, and is fetched again
    return SyncedFile(piece.inode if whole else "-", piece.size, piece.time, file.stat().st_mtime_ns)


def _read_index(run: Path) -> dict[str, SyncedFile]:
    return {name: SyncedFile(*file) for name, file in read_record(run / INDEX).items()}


def _write_index(run: Path, files: Mapping[str, SyncedFile]) -> None:
    if run.is_dir():  # not deleted in the meantime
        record = {name: (file.inode, file.size, file.time, file.local_time) for name, file in files.items()}
        replace_bytes(run / INDEX, json.dumps(record).encode())

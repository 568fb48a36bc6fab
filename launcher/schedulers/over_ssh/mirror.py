"""Local copies of run directories on a host, kept up to date.

Changes of either side travel with every query in the same round trip. Readers use the copy like any run
directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import re
import secrets
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath

from launcher.rundir.contents import DELETED, GROWING, SENT, expression
from launcher.rundir.files import read_record, replace_bytes
from launcher.rundir.layout import RunDir
from launcher.schedulers.base import SchedulerError
from launcher.schedulers.local_copies import is_below, is_state, keep_checkpoints, private_folder
from launcher.schedulers.login import CutError, Login
from launcher.schedulers.over_ssh import exchange
from launcher.schedulers.over_ssh.exchange import UNSEEN, Changes, Exchanged, Known, Piece
from launcher.schedulers.wanted import Wanted

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
    """A Login whose round trips bring the chosen runs up to date on both sides.

    Local changes are sent first, then the script runs, then the host's changes are fetched.
    """

    def __init__(self, login: Login, here: Path, there: str) -> None:
        self.login, self.here, self.there = login, here, there
        self.name = login.name
        self.first = ""
        "Shell that must succeed before anything else is done."
        self.strict = False
        "Do nothing if our changes cannot be written, or if the host has changed the same files."
        self.lost: set[str] = set()
        "Runs whose directory no longer exists on the host."
        self.too_large: set[str] = set()
        "Files that are too large to be copied."
        self._unanswered = False
        "Whether the host may have our changes without our knowledge, because its last answer was lost."
        self._doubted: Counter[str] = Counter()
        "How often a state.json that came was none, since a valid one."
        self._runs: list[str] = []
        self._wanted = Wanted()

    def choose(self, runs: Iterable[RunDir], wanted: Wanted | None = None) -> None:
        """Choose what the next round trips fetch; by default the records without any rank's output."""
        self._runs, self._wanted = [run.id for run in runs], wanted or Wanted()

    def _doubt(self, path: str, came: Exchanged) -> None:
        """Fetch a state.json that is none again: it may have been replaced meanwhile. Then report it."""
        self._doubted[path] += 1
        if self._doubted[path] == 1:
            came.more = True
        elif self._doubted[path] == 2:
            where = f"{self.there}/{path} on {self.name} is not a valid state of a run"
            print(f"{where}; the previous one is kept", file=sys.stderr)

    def run(
        self, script: str, *, stdin: bytes = b"", timeout: float = 60.0
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a script. Raises LoginError; RefusedError if `strict`, and then `script` has not run."""
        if self.strict and self._unanswered:  # our own changes would look like the host's
            self._exchange(":", b"", timeout)
        try:
            done = self._exchange(script, stdin, timeout, strict=self.strict)
        except RefusedError:
            if self.strict:
                raise
            done = self._exchange(script, stdin, timeout, send=False)
        more = done.more
        while more:  # after a long absence the data comes in parts, to limit memory
            more = self._exchange(":", b"", timeout).more
        return done.answer

    def has_sent(self, file: Path) -> bool:
        """Whether the host has `file`, at the top of a run directory, as it is here."""
        known = _read_index(file.parent).get(file.name)
        return known is not None and known.here == file.stat().st_mtime_ns

    def _exchange(
        self, script: str, stdin: bytes, timeout: float, *, send: bool = True, strict: bool = False
    ) -> Exchanged:
        mark = secrets.token_hex(8)
        with _alone(self.here):  # two processes would both send what neither has sent yet
            index = {run: _read_index(self.here / run) for run in self._runs}
            changes = _changes(self.here, index) if send else Changes()
            sent = _taken(self.here, index, send)
            parcel = _parcel(self.here, changes) if changes else b""
            known = _expected(self.here, index, changes)
            text = exchange.text(
                mark,
                self.there,
                self.first,
                changes,
                len(parcel),
                script,
                self._runs,
                known,
                self._wanted,
                strict,
            )
            patience = timeout + len(parcel) / SLOWEST
            self._unanswered = True
            done = self.login.run(text, stdin=parcel + stdin, timeout=patience)
            try:
                came = exchange.parse(done, mark)
            except exchange.NotWholeError as error:
                raise CutError(f"{self.name}: {error}") from None
            self._unanswered = False
            if came.refused is not None:
                kind = ChangedThereError if came.changed_there else RefusedError
                raise kind(f"nothing was done on {self.name}: {came.refused}")
            self._apply(came, index, known, sent)
        return came

    def _apply(
        self,
        came: Exchanged,
        before: Mapping[str, Mapping[str, Known]],
        known: Mapping[str, Known],
        sent: Mapping[str, tuple[int, int]],
    ) -> None:
        """Write what was fetched.

        Whatever the host sends, only files below the requested runs are written.
        """
        self.lost = came.lost
        fresh: dict[str, dict[str, Known]] = {run: {} for run in self._runs}
        for path, was in known.items():
            run, _, name = path.partition("/")
            fresh[run][name] = was
        checkpoints: dict[str, set[str]] = {run: set() for run in self._runs}
        for piece in came.pieces:
            run, _, name = piece.path.partition("/")
            if run not in fresh or run in came.lost or not is_below(name):
                continue
            file = self.here / run / name
            untouched = not file.exists() or sent.get(piece.path, (0, 0))[1] in (0, file.stat().st_mtime_ns)
            if piece.kind == "gone" and untouched:
                file.unlink(missing_ok=True)
                fresh[run].pop(name, None)
            elif piece.kind == "large":
                self.too_large.add(piece.path)
            elif piece.kind == "folder":
                checkpoints[run].add(file.name)
            elif piece.kind == "same":
                fresh[run][name] = replace(fresh[run][name], inode=piece.inode, time=piece.time)
            elif piece.kind == "end":
                fresh[run][name] = _write_end(file, piece, sent.get(piece.path))
            elif name == "state.json" and piece.kind == "whole" and not is_state(piece.data):
                self._doubt(piece.path, came)
            elif piece.kind == "whole" and untouched:
                self._doubted.pop(piece.path, None)
                fresh[run][name] = _write_whole(file, piece)
        for run in set(self._runs) - came.lost:
            keep_checkpoints(RunDir(self.here / run), checkpoints[run])
            if fresh[run] != before[run] or not (self.here / run / INDEX).exists():
                _write_index(self.here / run, fresh[run])


def forget(run: RunDir) -> None:
    """Forget what a host has of a run: the next round trip sends all of it."""
    (run.path / INDEX).unlink(missing_ok=True)


def packed(run: Path, names: Iterable[str]) -> bytes:
    """A tar of these files and folders of a run directory, as far as they exist."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in names:
            if (run / name).exists():
                tar.add(run / name, name, filter=_nobodys)
    return out.getvalue()


def _changes(here: Path, index: Mapping[str, Mapping[str, Known]]) -> Changes:
    changes = Changes()
    for run, known in index.items():
        folder = here / run
        if not known:
            if (folder / "run.json").is_file():
                changes.new.append(run)
            continue
        found = _ours(folder)
        for name in found:
            before, now = known.get(name), (folder / name).stat()
            if before is None:
                changes.written[f"{run}/{name}"] = None
            elif before.here == now.st_mtime_ns:
                continue
            elif not name.endswith(GROWING):
                changes.written[f"{run}/{name}"] = before
            elif now.st_size > before.size:
                changes.grown[f"{run}/{name}"] = before.size
        for name in known:
            if name not in found and any(re.fullmatch(expression(one), name) for one in DELETED):
                changes.removed[f"{run}/{name}"] = known[name]
    return changes


def _taken(here: Path, index: Mapping[str, Mapping[str, Known]], send: bool) -> dict[str, tuple[int, int]]:
    """Path -> (size, time in ns) of each file as the host knows it after this round trip."""
    taken = {}
    for run, known in index.items():
        for name in _ours(here / run):
            now, was = (here / run / name).stat(), known.get(name)
            if send:
                taken[f"{run}/{name}"] = (now.st_size, now.st_mtime_ns)
            elif was is not None:
                taken[f"{run}/{name}"] = (was.size, was.here)
    return taken


def _ours(run: Path) -> list[str]:
    files = (file for pattern in SENT for file in run.glob(pattern) if not _hidden(file, run))
    return sorted(str(file.relative_to(run)) for file in files)


def _hidden(file: Path, run: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(run).parts)


def _parcel(here: Path, changes: Changes) -> bytes:
    """A tar of what is sent. A file that has grown is sent from its old end."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for run in changes.new:
            tar.add(here / run, run, filter=_nobodys)
        for path, start in changes.grown.items():
            _add(tar, here, path, start)
        for path in changes.written:
            _add(tar, here, path)
    return out.getvalue()


def _nobodys(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Drop our user, group and own index, and write permissions for others."""
    info.uid = info.gid = 0
    info.mode &= _MODE
    info.uname = info.gname = ""
    return None if PurePosixPath(info.name).name == INDEX else info


def _add(tar: tarfile.TarFile, here: Path, path: str, start: int = 0) -> None:
    data, now = (here / path).read_bytes()[start:], (here / path).stat()
    info = tarfile.TarInfo(path)
    info.size, info.mode, info.mtime = len(data), now.st_mode & _MODE, int(now.st_mtime)
    tar.addfile(info, io.BytesIO(data))


def _expected(here: Path, index: Mapping[str, Mapping[str, Known]], changes: Changes) -> dict[str, Known]:
    """The files on the host once our changes are applied. Equal files need not be fetched."""
    known = {f"{run}/{name}": was for run, files in index.items() for name, was in files.items()}
    for run in changes.new:
        for file in (here / run).rglob("*"):
            if file.is_file() and not _hidden(file, here / run):
                known[f"{run}/{file.relative_to(here / run)}"] = _sent(file)
    for path, before in changes.written.items():
        if before is None:
            known[path] = _sent(here / path)
    return {path: was for path, was in known.items() if path not in changes.removed}


def _sent(file: Path) -> Known:
    now = file.stat()
    return Known(UNSEEN, now.st_size, "-", now.st_mtime_ns)


def _write_end(file: Path, piece: Piece, sent: tuple[int, int] | None) -> Known:
    """Write the new end.

    What was appended here since the round trip began stays after it and is sent next time.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "r+b" if file.exists() else "w+b") as to:
        to.seek(sent[0] if sent is not None else 0, os.SEEK_SET if sent is not None else os.SEEK_END)
        unsent = to.read()
        to.seek(piece.offset)
        to.write(piece.data + unsent)
        to.truncate()
    size = piece.offset + len(piece.data)
    return Known(piece.inode, size, piece.time, 0 if unsent else file.stat().st_mtime_ns)


def _write_whole(file: Path, piece: Piece) -> Known:
    replace_bytes(file, piece.data)
    whole = len(piece.data) == piece.size  # otherwise it changed while it was read, and is fetched again
    return Known(piece.inode if whole else "-", piece.size, piece.time, file.stat().st_mtime_ns)


def _read_index(run: Path) -> dict[str, Known]:
    return {name: Known(*was) for name, was in read_record(run / INDEX).items()}


def _write_index(run: Path, files: Mapping[str, Known]) -> None:
    if run.is_dir():  # not deleted in the meantime
        record = {name: (was.inode, was.size, was.time, was.here) for name, was in files.items()}
        replace_bytes(run / INDEX, json.dumps(record).encode())


@contextlib.contextmanager
def _alone(here: Path) -> Iterator[None]:
    with open(private_folder(here) / ".lock", "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

"""A local copy of a run directory on a network volume. Readers use it like any other run directory."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from launcher.rundir.file_table import GROWING, LOG_FOLDERS, NOT_COPIED_FOLDERS, REPLACED, REQUESTS, SUBMITTED
from launcher.rundir.files import locked, parsed, read_record, replace_bytes
from launcher.rundir.layout import RunDir
from launcher.schedulers.base import SchedulerError
from launcher.schedulers.local_copies import files_of, is_below, is_state, keep_checkpoints
from launcher.schedulers.over_ssh.exchange import LARGEST_LOG, LARGEST_RECORD
from launcher.schedulers.runpod.errors import clean
from launcher.schedulers.runpod.volume import GoneError, Object, Volume, VolumeError
from launcher.schedulers.wanted_files import Wanted
from launcher.spec.progress import Advance, working
from launcher.spec.records import StateRecord

INDEX = ".volume.json"
"""File in the local copy with, for each file: bytes read, its mark on the volume, and the time (ns) of the
version that was sent.

The mark of a state.json that was sent from this machine is its text."""
MARKS = ".marks.json"
"File in a download that holds each file's mark on the volume when it was downloaded, and under `RUN` the id."
RUN = ""

Index = dict[str, list[Any]]


class Copy:
    """The local copy of one run. `prefix` is the run's folder on the volume and ends with a slash."""

    def __init__(self, run: RunDir, volume: Volume, prefix: str) -> None:
        self.run, self.volume, self.prefix = run, volume, prefix

    def fetch(self, wanted: Wanted) -> str | None:
        """Fetch what is new on the volume, and send requests that were written on this machine.

        Return why the state on the volume is invalid, or None. Raises VolumeError.
        """
        with working(f"reading what {self.run.id} has written"), self._index() as index:
            self._send_requests(index)
            state = self._state()  # first: if it shows the end of the run, all files read later are final
            for item in self._listed("", wanted, index):
                self._fetch(item, index)
            return self._take_state(state, index)

    def send(self) -> None:
        """Send the requests that were written on this machine. Raises VolumeError."""
        with self._index() as index:
            self._send_requests(index)

    def push(self) -> None:
        """Send everything that was written on this machine, before a pod starts. Raises VolumeError."""
        with self._index() as index:
            names = ["run.json", "plan.json", "events.jsonl", "state.json"]
            names += files_of(self.run.path, [f"{folder}/**/*" for folder in SUBMITTED])
            for item in self.volume.all(f"{self.prefix}plans/"):  # an earlier submission that was refused
                if item.key.removeprefix(self.prefix) not in names:
                    self.volume.delete(item.key)
            files = {name: (self.run.path / name).read_bytes() for name in names}
            for name, data in files.items():
                index[name] = [len(data), data.decode() if name == "state.json" else "", 0]
            self._write_index(index)  # first, because after an error or a kill some files may be written
            for name, data in files.items():
                self.volume.write(self.prefix + name, data)
            if not self.run.cancel.exists():
                self.volume.delete(f"{self.prefix}cancel")
                index.pop("cancel", None)

    def remove(self) -> None:
        """Delete the run from the volume. Raises VolumeError."""
        for item in list(self.volume.all(self.prefix)):
            self.volume.delete(item.key)

    def download(self, to: Path) -> int:
        """Download the whole run, checkpoints included, and return the number of bytes received.

        Files that are already up to date are skipped. Raises SchedulerError if `to` has another run, because
        checkpoints of both would be mixed, VolumeError, OSError.
        """
        received, marks = 0, read_record(to / MARKS)
        if (other := marks.setdefault(RUN, self.run.id)) != self.run.id:
            raise SchedulerError(f"{to} has the run {other}: download {self.run.id} to another directory")
        try:
            items = list(self.volume.all(self.prefix))
            with working(f"downloading {self.run.id}", sum(item.size for item in items)) as advance:
                for item in items:
                    name = item.key.removeprefix(self.prefix)
                    file = to / name
                    local_size = file.stat().st_size if is_below(name) and file.is_file() else None
                    if not is_below(name) or (local_size == item.size and marks.get(name) == item.mark):
                        advance(item.size)
                        continue
                    with contextlib.suppress(GoneError):  # deleted since it was listed
                        received += self._save(item.key, file, advance)
                        marks[name] = item.mark
        finally:
            if len(marks) > 1:
                replace_bytes(to / MARKS, json.dumps(marks).encode())
        return received

    def _save(self, key: str, file: Path, advance: Advance) -> int:
        """Save one consistent version of a file, although the run may be writing it.

        A file that only grows is saved up to its current size.
        """
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f".{file.name}.partial")
        try:
            for _ in range(3):
                object_, start = self.volume.look(key), 0
                with open(partial, "wb") as out:
                    while start < object_.size and (data := self.volume.read(key, start, object_.size)):
                        out.write(data)
                        start += len(data)
                        advance(len(data))
                if start == object_.size and (file.suffix in GROWING or self.volume.look(key) == object_):
                    partial.replace(file)
                    return start
        finally:
            partial.unlink(missing_ok=True)
        raise VolumeError(f"volume {self.volume.id}: {clean(key)} changed during every attempt to read it")

    def text(self, name: str) -> str:
        """Return the text of a small file on the volume, or "" if it does not exist."""
        try:
            return self.volume.read(self.prefix + name, 0, 4096).decode(errors="replace").strip()
        except GoneError:
            return ""

    def has_sent(self, file: Path) -> bool:
        """Return whether the volume has the current version of `file`, a request in the run directory."""
        known: Index = read_record(self.run.path / INDEX)
        return bool(known.get(file.name, [0, "", 0])[2] == file.stat().st_mtime_ns)

    def has_begun(self) -> bool:
        """Return whether the run has begun, according to state.json on the volume. Raises VolumeError."""
        text = self.text("state.json")
        state = StateRecord.read(parsed(text.encode()))  # None if it is incomplete, so a pod is writing it
        return bool(text) and (state is None or state.state != "submitted")

    def _send_requests(self, index: Index) -> None:
        for name in files_of(self.run.path, REQUESTS):
            path, now = self.run.path / name, (self.run.path / name).stat().st_mtime_ns
            if index.get(name, [0, "", 0])[2] != now:
                self.volume.write(self.prefix + name, path.read_bytes())
                index[name] = [path.stat().st_size, "", now]

    def _listed(self, folder: str, wanted: Wanted, index: Index) -> Iterator[Object]:
        files, folders = self.volume.walk(self.prefix + folder)
        yield from (item for item in files if self._is_wanted(item, wanted))
        for name in folders:
            if name == "checkpoints" and not folder:
                steps = self.volume.walk(f"{self.prefix}checkpoints/")[1]
                keep_checkpoints(self.run, [one for one in steps if is_below(one) and one[0] != "."])
            elif _skipped(folder, name) or not is_below(name) or (name in LOG_FOLDERS and not wanted.logs):
                continue
            elif folder == "attempts/" and name != max(folders):
                yield from self._earlier(f"{folder}{name}/", wanted, index)
            else:
                yield from self._listed(f"{folder}{name}/", wanted, index)

    def _earlier(self, folder: str, wanted: Wanted, index: Index) -> Iterator[Object]:
        """Yield the files of an earlier attempt, which is read once after its end, and then never again."""
        read, over = index.get(folder, [0, "", 0]), f"{folder}verdict.json" in index
        if read[0] >= (2 if wanted.logs else 1):
            return
        yield from self._listed(folder, wanted, index)
        if over and wanted.ranks is None and wanted.nodes is None:
            index[folder] = [2 if wanted.logs else 1, "", 0]

    def _is_wanted(self, item: Object, wanted: Wanted) -> bool:
        name = item.key.removeprefix(self.prefix)
        suffix = PurePosixPath(name).suffix
        fits = item.size <= (LARGEST_LOG if suffix in GROWING else LARGEST_RECORD)
        own_files = name in ("state.json", "run.json", "plan.json")
        return (
            is_below(name)
            and not own_files
            and suffix in (*GROWING, *REPLACED)
            and fits
            and wanted.covers(name)
        )

    def _fetch(self, item: Object, index: Index) -> None:
        name = item.key.removeprefix(self.prefix)
        path, known = self.run.path / name, index.get(name, [0, "", 0])
        if PurePosixPath(name).suffix in GROWING:
            for read in self._append(path, item, int(known[0]), name == "events.jsonl"):
                index[name] = [read, item.mark, 0]
                self._write_index(index)  # now: after a kill, the same bytes would be appended again
        elif [item.size, item.mark] != known[:2] and name not in self._sent(index):
            replace_bytes(path, self.volume.read(item.key, 0, item.size))
            index[name] = [item.size, item.mark, 0]

    def _sent(self, index: Index) -> set[str]:
        """Return the files that are sent to the volume and never fetched from it."""
        return {name for name, known in index.items() if known[2]}

    def _append(self, path: Path, item: Object, start: int, whole_lines: bool) -> Iterator[int]:
        """Append what is new after `start`, and yield how far the file has been read after each part.

        With `whole_lines`, only complete lines are appended, because our own events go into the same file.
        """
        if item.size < start:  # the file was rewritten
            if whole_lines:
                yield item.size
                return
            path.unlink(missing_ok=True)
            start = 0
            yield start
        path.parent.mkdir(parents=True, exist_ok=True)
        while start < item.size:
            data = self.volume.read(item.key, start, item.size)
            if whole_lines:
                data = data[: data.rfind(b"\n") + 1]
            if not data:
                break
            with open(path, "ab") as file:
                file.write(data)
            start += len(data)
            yield start

    def _state(self) -> tuple[Object, bytes] | None:
        try:
            item = self.volume.look(f"{self.prefix}state.json")
            return item, self.volume.read(item.key, 0, min(item.size, LARGEST_RECORD))
        except GoneError:
            return None

    def _take_state(self, read: tuple[Object, bytes] | None, index: Index) -> str | None:
        """Take the state if the run has written it since we wrote ours. Return why it is invalid, or None."""
        if read is None:
            return None
        if index.get("state.json", [0, "", 0])[1] in (read[0].mark, read[1].decode(errors="replace")):
            return None
        if not is_state(read[1]):
            there = f"{self.prefix}state.json on the volume {self.volume.id}"
            return f"{there} is not a valid state of a run; the previous one is kept"
        replace_bytes(self.run.state, read[1])
        index["state.json"] = [read[0].size, read[0].mark, 0]
        return None

    @contextlib.contextmanager
    def _index(self) -> Iterator[Index]:
        """Open the index under a lock, so that two processes do not append the same bytes."""
        with locked(self.run.path / ".volume.lock"):
            index: Index = read_record(self.run.path / INDEX)
            try:
                yield index
            finally:
                self._write_index(index)

    def _write_index(self, index: Index) -> None:
        replace_bytes(self.run.path / INDEX, json.dumps(index).encode())


def _skipped(folder: str, name: str) -> bool:
    return name.startswith(".") or name in NOT_COPIED_FOLDERS or (not folder and name in SUBMITTED)

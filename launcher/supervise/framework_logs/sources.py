"""Choose the framework's log from which an attempt's metrics are read."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from launcher.rundir.layout import RunDir
from launcher.supervise.framework_logs import lightning_csv, tensorboard, trainer_state, wandb_offline
from launcher.supervise.framework_logs.reading import LogReader, Reading
from launcher.supervise.framework_logs.search import files_named
from launcher.supervise.host import last_sign, shows_life
from launcher.supervise.process import open_files, processes_of

SEARCH_SECONDS = 2.0
SEARCH_SHARE = 0.05
"Maximum fraction of time spent searching."


class Kind(NamedTuple):
    """A kind of log."""

    name: str
    files: str
    "Pattern of the file names."
    reader: Callable[[Path, float], LogReader]
    group: Callable[[Path], Path]
    "Maps a file to what one reader covers: that file, a folder, or a writer in a folder."
    earlier: bool = False
    "Whether the reader needs files from before the start."


# If several kinds have new lines, the first one wins, so those with times come first.
KINDS = (
    Kind("tensorboard", tensorboard.NAMES, tensorboard.TensorBoardReader, tensorboard.writer),
    Kind("wandb", wandb_offline.NAMES, wandb_offline.WandbReader, lambda path: path),
    Kind("lightning", lightning_csv.NAMES, lightning_csv.CsvReader, lambda path: path),
    Kind(
        "transformers",
        trainer_state.NAMES,
        trainer_state.TrainerStateReader,
        trainer_state.output_folder,
        earlier=True,
    ),
)


class Source:
    """Watches logs in the run directory and the working folder until one of them contains a step.

    From then on, it reads only that log, so that no step counts twice: a Trainer may report to W&B and
    TensorBoard at the same time. If another run trains in the same working folder, it reads only logs that a
    process of this run writes.
    """

    def __init__(self, run: RunDir, workdir: Path, since: float) -> None:
        """`since` is when the rank was started, in Unix seconds. Files unchanged since then are ignored."""
        self._run, self._workdir, self._since = run, workdir, since
        self._readers: dict[tuple[int, Path], LogReader | None] = {}
        "(position in KINDS, group) -> reader, or None if the file has another format."
        self._chosen: tuple[str, LogReader] | None = None
        self._next_search = 0.0
        self._other_workdirs: set[str] = set()
        "Real paths of working folders in which other runs have trained since the start."
        self._own_logs: set[Path] = set()
        "Logs in such a folder that a process of this run has written."

    def read(self, search: bool = False) -> tuple[str, list[Reading]]:
        """Return the kind of the chosen log and its new readings. With `search`, search at once."""
        if self._chosen is not None:
            name, reader = self._chosen
            return name, _new(reader) or []
        if search or time.monotonic() >= self._next_search:
            self._search()
        # `add_scalars` writes each of its lines into a folder below the log.
        for index, path in sorted(self._readers, key=lambda key: (key[0], len(key[1].parts), key[1])):
            reader_or_none = self._readers[index, path]
            if reader_or_none is None:
                continue
            readings = _new(reader_or_none)
            if readings is None:
                self._readers[index, path] = None
            elif readings:
                self._chosen = KINDS[index].name, reader_or_none
                return KINDS[index].name, readings
        return "", []

    def _search(self) -> None:
        began = time.monotonic()
        self._other_workdirs |= self._workdirs_of_others()
        patterns = {kind.files: 0.0 if kind.earlier else self._since for kind in KINDS}
        paths = [
            *files_named(patterns, self._run.path),
            *files_named(patterns, self._workdir, self._other_workdirs),
        ]
        if self._other_workdirs:
            self._own_logs |= self._written_by_us(patterns)
        path_by_group = {}
        for path in (*paths, *self._own_logs):
            index = next(index for index, kind in enumerate(KINDS) if path.match(kind.files))
            path_by_group[index, KINDS[index].group(path)] = path
        for key, path in path_by_group.items():
            if key not in self._readers:
                self._readers[key] = KINDS[key[0]].reader(path, self._since)
        for key in self._readers.keys() - path_by_group:  # logs in a folder that another run now shares
            del self._readers[key]
        seconds = time.monotonic() - began
        self._next_search = time.monotonic() + max(SEARCH_SECONDS, seconds / SEARCH_SHARE)

    def _written_by_us(self, patterns: Mapping[str, float]) -> set[Path]:
        """Return logs that a process of this run has open, or whose names contain its process id."""
        pids = processes_of(self._run.path)
        names = {tensorboard.process(socket.gethostname(), pid) for pid in pids}
        open_logs = {path for path in open_files(pids) if any(map(path.match, patterns))}
        events = files_named({tensorboard.NAMES: self._since}, self._workdir)
        return open_logs | {path for path in events if tensorboard.writer(path).name in names}

    def _workdirs_of_others(self) -> set[str]:
        """Return the real paths of the working folders of all other runs that trained since the start."""
        workdirs = set()
        with contextlib.suppress(OSError):
            for folder in self._run.path.parent.iterdir():
                other = RunDir(folder)
                if folder != self._run.path and _trained_since(other, self._since):
                    workdir = other.read_about().workdir
                    workdirs |= set() if workdir is None else {os.path.realpath(workdir)}
        return workdirs


def _trained_since(run: RunDir, since: float) -> bool:
    """Return whether a run has had ranks since a time in Unix seconds, even if only for a moment.

    A run that waits for its turn has had none.
    """
    if not run.attempts() or run.read_state().state == "submitted":
        return False
    return last_sign(run) >= since or shows_life(run)


def _new(reader: LogReader) -> list[Reading] | None:
    """Return the new readings; [] if the file cannot be read now, None if it has another format."""
    try:
        return reader.read()
    except OSError:
        return []
    except Exception:  # a program's file may contain any bytes, and none may end the worker's thread
        return None

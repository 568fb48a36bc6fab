"""Read scalars from TensorBoard's event files, which torch, transformers and Lightning write.

A file is a sequence of records: length (8 bytes), its checksum (4), an `Event` message, its checksum (4).
Source: tensorflow/core/lib/io/record_writer.h, tensorflow/core/util/event.proto, summary.proto.
"""

from __future__ import annotations

import contextlib
import re
import struct
from collections.abc import Iterator
from pathlib import Path

from launcher.rundir.files import open_regular
from launcher.supervise.framework_logs.protobuf import fields, parts
from launcher.supervise.framework_logs.reading import Reading

NAMES = "events.out.tfevents.*"
_OF_PROCESS = re.compile(r"events\.out\.tfevents\.\d+\.(.+\.\d+)\.\d+(?:\.v2)?")
"`events.out.tfevents.TIME.HOST.PID.NUMBER`, as tensorboard and TensorFlow name their files."
MAX_EVENT = 2**20
"Maximum bytes of an event. Larger ones, such as images and graphs, are skipped."
_WALL_TIME, _STEP, _SUMMARY = 1, 2, 5
"Fields of Event."
_VALUE = 1
"Field of Summary."
_TAG, _SIMPLE_VALUE = 1, 2
"Fields of Summary.Value."


def writer(path: Path) -> Path:
    """Return an event file's folder with the host and process id in its name, or the file without them."""
    named = _OF_PROCESS.fullmatch(path.name)
    return path if named is None else path.with_name(named[1])


def process(host: str, pid: int) -> str:
    """Return the name that `writer` gives to a process."""
    return f"{host}.{pid}"


class TensorBoardReader:
    """Reads what one process has written into one folder since a given time, perhaps in several files.

    Other runs, and other ranks of this run, may write into the same folder.
    """

    def __init__(self, path: Path, since: float) -> None:
        self._folder, self._writer, self._since = path.parent, writer(path), since
        self._read: dict[Path, int] = {}
        "File -> bytes read."

    def read(self) -> list[Reading]:
        own_files = sorted(path for path in self._folder.glob(NAMES) if writer(path) == self._writer)
        paths = [path for path in own_files if path.stat().st_mtime >= self._since]
        return [reading for path in paths for reading in self._readings(path)]

    def _readings(self, path: Path) -> list[Reading]:
        """Return one reading per run of equal steps. Lightning logs `epoch` and counts steps from 0."""
        readings: list[Reading] = []
        for time, step, tag, value in self._scalars(path):
            if not readings or readings[-1].step != step:
                readings.append(Reading(step, {}, time))
            metrics = {**readings[-1].metrics, tag: value}
            readings[-1] = Reading(step, metrics, time, first=0 if "epoch" in metrics else None)
        return readings

    def _scalars(self, path: Path) -> Iterator[tuple[float, int, str, float]]:
        for event in self._events(path):
            with contextlib.suppress(ValueError, struct.error):  # skip only the damaged event
                yield from _scalars_of(event)

    def _events(self, path: Path) -> Iterator[bytes]:
        at = self._read.get(path, 0)
        with open_regular(path) as file:
            size = file.seek(0, 2)
            while at + 12 <= size:
                file.seek(at)
                (length,) = struct.unpack("<Q", file.read(8))
                if not length or at + 16 + length > size:  # incomplete; zeros may be filled in later
                    break
                file.seek(at + 12)
                event = file.read(length) if length <= MAX_EVENT else b""
                at = self._read[path] = at + 16 + length
                yield event


def _scalars_of(event: bytes) -> Iterator[tuple[float, int, str, float]]:
    """Yield (time, step, tag, value). Raises ValueError or struct.error if the event is damaged."""
    time, step = 0.0, 0
    for field, value in fields(event):
        if field == _WALL_TIME and isinstance(value, bytes):
            (time,) = struct.unpack("<d", value)
        elif field == _STEP and isinstance(value, int):
            step = value
        elif field == _SUMMARY and isinstance(value, bytes):
            for summary_value in parts(value, _VALUE):
                by_field = dict(fields(summary_value))
                tag, number = by_field.get(_TAG), by_field.get(_SIMPLE_VALUE)
                if isinstance(tag, bytes) and isinstance(number, bytes):
                    yield time, step, tag.decode(errors="replace"), struct.unpack("<f", number)[0]

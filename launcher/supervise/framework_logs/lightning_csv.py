"""Read the file of Lightning's CSVLogger, `version_*/metrics.csv`, written every 100 steps and at the end."""

from __future__ import annotations

import contextlib
import csv
import io
import os
from pathlib import Path

from launcher.rundir.files import open_regular
from launcher.supervise.framework_logs.reading import Reading

NAMES = "metrics.csv"
MAX_TEXT = 2**26
"Maximum bytes to read at once, because a data set may have the same name."


class CsvReader:
    """Reads the rows of one file. Lightning rewrites it with a longer header when a new metric appears."""

    def __init__(self, path: Path, since: float) -> None:
        self._path, self._head, self._at, self._rows = path, b"", 0, 0

    def read(self) -> list[Reading]:
        with open_regular(self._path) as file:
            head = file.readline(MAX_TEXT)
            already_read = (
                self._rows if head != self._head else 0
            )  # rows of this text that were already returned
            start = self._at if head == self._head else len(head)
            file.seek(start)
            text, written = file.read(MAX_TEXT + 1), os.fstat(file.fileno()).st_mtime
        if len(text) > MAX_TEXT:
            raise ValueError(f"{self._path} has too many rows")
        complete = text[: text.rfind(b"\n") + 1]
        rows = list(csv.reader(io.StringIO(complete.decode(errors="replace"))))
        if len(rows) < already_read or not head.endswith(b"\n"):  # the file is being rewritten
            return []
        names = next(csv.reader([head.decode(errors="replace")]), [])
        if "step" not in names:
            raise ValueError(f"{self._path} has no column `step`")
        self._head, self._at = head, start + len(complete)
        self._rows += len(rows) - already_read
        return [_reading(dict(zip(names, row, strict=False)), written) for row in rows[already_read:]]


def _reading(row: dict[str, str], written: float) -> Reading:
    """Return the numbers of a row as a Reading. Raises ValueError if its step is none.

    Lightning logs `epoch` and counts steps from 0.
    """
    metrics: dict[str, float] = {}
    for name, value in row.items():
        if name != "step":
            with contextlib.suppress(ValueError):  # empty, or a text
                metrics[name] = float(value)
    return Reading(int(row["step"]), metrics, written=written, first=0 if "epoch" in metrics else None)

"""The CSVLogger of Lightning: `version_*/metrics.csv`, written every 100 steps and at the end."""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path

from launcher.rundir.files import open_regular
from launcher.supervise.framework_logs.reading import Reading

NAMES = "metrics.csv"
MAX_TEXT = 2**26
"Bytes that are read at once. A data set may have this name."


class CsvReader:
    """Reads the rows of one file. When a new metric appears, Lightning writes it again with a longer head."""

    def __init__(self, path: Path, since: float) -> None:
        self._path, self._head, self._at, self._rows = path, b"", 0, 0

    def read(self) -> list[Reading]:
        with open_regular(self._path) as file:
            head = file.readline(MAX_TEXT)
            known = self._rows if head != self._head else 0  # rows of this text that were told already
            at = self._at if head == self._head else len(head)
            file.seek(at)
            text, written = file.read(MAX_TEXT + 1), os.fstat(file.fileno()).st_mtime
        if len(text) > MAX_TEXT:
            raise ValueError(f"{self._path} has too many rows")
        whole = text[: text.rfind(b"\n") + 1]
        rows = list(csv.reader(io.StringIO(whole.decode(errors="replace"))))
        if len(rows) < known or not head.endswith(b"\n"):  # it is being written again
            return []
        names = next(csv.reader([head.decode(errors="replace")]), [])
        if "step" not in names:
            raise ValueError(f"{self._path} has no column `step`")
        self._head, self._at = head, at + len(whole)
        self._rows += len(rows) - known
        return [_reading(dict(zip(names, row, strict=False)), written) for row in rows[known:]]


def _reading(row: dict[str, str], written: float) -> Reading:
    """Lightning logs `epoch` and counts steps from 0. Raises ValueError for what is no number."""
    metrics = {name: float(value) for name, value in row.items() if value and name != "step"}
    return Reading(int(row["step"]), metrics, written=written, first=0 if "epoch" in metrics else None)

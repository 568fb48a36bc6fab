"""Read the new lines of a growing JSON file, starting near its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launcher.logs.read import OffsetReader, offset_near_end
from launcher.rundir.files import parsed


class NewLines:
    """Reads a file of any size in constant time: at most `most` bytes per call, the newest ones."""

    def __init__(self, path: Path, most: int) -> None:
        self._path, self._most = path, most
        self._reader = OffsetReader(path)

    def read(self) -> list[dict[str, Any]]:
        """Return the objects added since the last call, or [] if the file cannot be read."""
        try:
            size = self._reader.size()
            if size < self._reader.offset or size - self._reader.offset > self._most:
                self._reader.offset = offset_near_end(self._path, self._most)
            if size == self._reader.offset:
                return []
            data = self._reader.read(self._most)
        except OSError:
            return []
        return [value for line in data.splitlines() if isinstance(value := parsed(line), dict)]

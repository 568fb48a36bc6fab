"""Traces and shapes on disk, so that a model's second plan needs neither torch nor the model's code.

They are valid while the task's code, the names of the modules beside it, and the versions of the libraries
are unchanged. Each model has one folder. Files are written atomically; a broken file is ignored.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launcher.memory.peaks import Like
from launcher.memory.shapes import ModelShapes, Parameter
from launcher.memory.trace import Affine, Storage, Trace, Work
from launcher.rundir.files import read_json, replace_text
from launcher.rundir.versions import version_of

PACKAGE = Path(__file__).resolve().parents[1]
LIBRARIES = ("torch", "transformers")


class TraceStore:
    """The store of one model: a task with its arguments, in a working directory."""

    def __init__(
        self, root: Path, task: str, args: Mapping[str, Any], workdir: str, like: Like = "cuda"
    ) -> None:
        name = _digest([task, args, workdir, like, _versions()])
        self.folder = root / name[:32]
        self._sources = self.folder / "sources.json"
        self.valid = self._unchanged()

    def get(self, key: Any) -> Any:
        """Return the stored value; None if it is missing or no longer valid."""
        return read_json(self._file(key)) if self.valid else None

    def put(self, key: Any, value: Any) -> None:
        """Store a value. Raises OSError."""
        replace_text(self._file(key), json.dumps(value))

    def reset(self, files: Iterable[Path]) -> None:
        """Empty the store and set the files that the model's code was read from. Raises OSError.

        Another module beside them also invalidates the store: Python may import it in place of one of them.
        Call this before the first `put`.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in self.folder.glob("*.json"):
            old.unlink(missing_ok=True)
        sources: dict[str, Any] = {str(file): _digest_of(file) for file in files}
        folders = {Path(file).parent for file in sources}
        sources |= {str(folder): _modules_in(folder) for folder in folders}
        replace_text(self._sources, json.dumps(sources))
        self.valid = True

    def _unchanged(self) -> bool:
        try:
            sources = json.loads(self._sources.read_text())
            return all(
                before == (_modules_in(Path(path)) if isinstance(before, list) else _digest_of(Path(path)))
                for path, before in sources.items()
            )
        except (OSError, ValueError):
            return False

    def _file(self, key: Any) -> Path:
        return self.folder / f"{_digest(key)[:32]}.json"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _digest_of(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _modules_in(folder: Path) -> list[str]:
    """Return the names of the folder's Python files."""
    return sorted(path.name for path in folder.glob("*.py"))


@functools.cache
def _versions() -> list[Any]:
    """Return the versions of the libraries, and the sizes and times of this package's files.

    In a checkout, the package's files change between releases.
    """
    files = [file.stat() for file in sorted(PACKAGE.rglob("*.py"))]
    libraries = [version_of(name) for name in LIBRARIES]
    return [*libraries, sum(file.st_size for file in files), max(file.st_mtime_ns for file in files)]


def pack_trace(trace: Trace) -> dict[str, Any]:
    fixed, per_sample, *texts = zip(*trace.storages, strict=True) if trace.storages else ((),) * 5
    numbers = {name: number for number, name in enumerate(dict.fromkeys(itertools.chain(*texts)))}
    return {
        "names": list(numbers),
        "storages": [fixed, per_sample, *([numbers[name] for name in column] for column in texts)],
        "events": trace.events,
        "phases": trace.phases,
        "work": trace.work,
    }


_storage: Callable[[tuple[Any, ...]], Storage] = functools.partial(tuple.__new__, Storage)
"Same as Storage(*row) in a third of the time: a trace has 10,000 rows."


def unpack_trace(packed: Mapping[str, Any]) -> Trace:
    name_of = packed["names"].__getitem__
    fixed, per_sample, *texts = packed["storages"]
    rows = zip(fixed, per_sample, *(map(name_of, column) for column in texts), strict=True)
    return Trace(
        storages=tuple(map(_storage, rows)),
        events=tuple(packed["events"]),
        phases=tuple((name, start) for name, start in packed["phases"]),
        work=Work(*(Affine(*law) for law in packed["work"])),
    )


def pack_shapes(model: ModelShapes) -> dict[str, Any]:
    return asdict(model)


def unpack_shapes(packed: Mapping[str, Any]) -> ModelShapes:
    parameters = (Parameter(**{**p, "shape": tuple(p["shape"])}) for p in packed["parameters"])
    units, blocks = (tuple(packed[name]) for name in ("outer_units", "blocks"))
    return ModelShapes(**{**packed, "parameters": tuple(parameters), "outer_units": units, "blocks": blocks})

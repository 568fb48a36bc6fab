"""The user's modules that plans of this process have imported.

A program or notebook may plan tasks of several folders, and edit them between two plans. Python would give
each plan the first module of that name.
"""

from __future__ import annotations

import importlib
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import psutil  # type: ignore[import-untyped]

from launcher.memory.store import PACKAGE

_LIBRARIES = {path for name, path in sysconfig.get_paths().items() if name.endswith(("lib", "stdlib"))}
_imported: dict[str, dict[str, tuple[ModuleType, int]]] = {}
"""Folder of a job -> the modules that its plans have imported, each with the time of its file, in ns; -1 if
the file has changed meanwhile."""
_active = ""
"The folder whose modules are in `sys.modules`."


def is_users(file: Path) -> bool:
    """Return whether the file is the user's: not of the standard library, an installed package or launcher,
    which count by their version."""
    folders = (*(Path(path) for path in _LIBRARIES), PACKAGE)
    # Some modules of torch are generated, and their files do not exist.
    real = file.suffix == ".py" and file.is_absolute() and file.is_file()
    return real and not any(file.is_relative_to(folder) for folder in folders)


def forget_changed(workdir: Path) -> None:
    """Let `modules_of` import all modules of the folder again if a file of one has changed."""
    modules = _imported.get(str(workdir), {})
    if any(_time(module) != time for module, time in modules.values()):
        _take_out(modules)
        modules.clear()
        importlib.invalidate_caches()


@contextmanager
def modules_of(workdir: Path) -> Iterator[None]:
    """Import from `workdir` in the block, and have the modules that earlier blocks imported for it."""
    global _active
    folder = str(workdir)
    modules = _imported.setdefault(folder, {})
    if folder != _active:
        _take_out(_imported.get(_active, {}))
        sys.modules.update((name, module) for name, (module, _) in modules.items())
        _active = folder
    if sys.path[:1] != [folder]:
        sys.path[:] = [folder, *(path for path in sys.path if path != folder)]
    before, began = set(sys.modules), time.time_ns()
    try:
        yield
    finally:
        for name in sys.modules.keys() - before:
            module = sys.modules[name]
            if _of_user(module):
                changed = _time(module)
                modules[name] = module, changed if changed < began else -1


def files_of_modules(workdir: Path) -> list[Path]:
    """Return the files of all of the user's modules.

    Raises OSError if a module in `workdir` may be older than its file.
    """
    started = psutil.Process().create_time() * 1e9
    times = {id(module): time for module, time in _imported.get(str(workdir), {}).values()}
    modules = {
        Path(module.__file__ or ""): module for module in list(sys.modules.values()) if _of_user(module)
    }
    for file, module in modules.items():
        # If the program has imported the module itself, it is not known when.
        latest = times.get(id(module), started)
        if file.is_relative_to(workdir) and _time(module) > latest:
            raise OSError(f"{file} has changed since its import")
    return list(modules)


def _of_user(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and is_users(Path(file))


def _take_out(modules: dict[str, tuple[ModuleType, int]]) -> None:
    for name, (module, _) in modules.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]


def _time(module: ModuleType) -> int:
    """Return when the module's file was changed, or 0 if it is gone."""
    try:
        return Path(str(module.__file__)).stat().st_mtime_ns
    except OSError:
        return 0

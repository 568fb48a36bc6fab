"""Finding runs by id, prefix or path, from any directory."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import platformdirs

from launcher.runs.layout import RunDir


class RunNotFoundError(Exception):
    """No run, or several, answer to a name; the message lists what there is."""


def default_root() -> Path:
    """`$LAUNCHER_RUNS`, else `runs/` in the current directory."""
    return Path(os.environ.get("LAUNCHER_RUNS", "runs"))


def open_run(path: Path) -> RunDir:
    """The run in a directory. Raises RunNotFoundError when it is none."""
    run = RunDir(path.absolute())
    if not {"id", "job"} <= set(run.read_about()):
        raise RunNotFoundError(f"{path} is no run directory: it has no readable run.json of launcher's")
    return run


def find_run(name: str | None) -> RunDir:
    """By handle, path, id, or the beginning of an id; None is the newest. Raises RunNotFoundError."""
    if name is None:
        runs = runs_in(default_root()) or runs_in()
        if not runs:
            raise RunNotFoundError("there is no run yet; start one with `launcher run JOB -c CLUSTER`")
        return runs[0]
    path = Path(name.removeprefix("local:"))
    if (path / "run.json").is_file():
        return open_run(path)
    runs = runs_in()
    matches = [run for run in runs if run.id == name] or [run for run in runs if run.id.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        several = ", ".join(run.id for run in matches)
        raise RunNotFoundError(f"{name!r} is the beginning of several runs: {several}")
    known = ", ".join(run.id for run in runs[:5]) or "none"
    raise RunNotFoundError(f"no run {name!r}; the newest are: {known}")


def runs_in(root: Path | None = None) -> list[RunDir]:
    """Runs below one root, or below all known ones; the newest first."""
    roots = [root] if root is not None else known_roots()
    found: dict[Path, RunDir] = {}
    for folder in roots:
        with contextlib.suppress(OSError):
            for entry in folder.iterdir():
                if not entry.name.startswith(".") and (entry / "run.json").is_file():
                    found[entry.resolve()] = RunDir(entry.absolute())
    return sorted(found.values(), key=_written, reverse=True)


def _written(run: RunDir) -> int:
    """When run.json was written, in ns; 0 when the run was deleted meanwhile."""
    try:
        return run.submitted.stat().st_mtime_ns
    except OSError:
        return 0


def latest_checkpoint(run: RunDir) -> int | None:
    """The step of the newest complete checkpoint (an incomplete one has another name)."""
    steps = []
    with contextlib.suppress(OSError):
        for entry in run.checkpoints.iterdir():
            prefix, _, number = entry.name.partition("-")
            if prefix == "step" and number.isdigit():
                steps.append(int(number))
    return max(steps, default=None)


def known_roots() -> list[Path]:
    """The current directory's runs first, then every folder that a run was ever started in."""
    return list(dict.fromkeys([default_root().absolute(), *_remembered()]))


def _remembered() -> list[Path]:
    try:
        return [Path(line) for line in _roots_file().read_text(encoding="utf-8").splitlines()]
    except OSError:
        return []


def remember_root(root: Path) -> None:
    """So that every verb finds a run from any directory. Best effort: a read-only home is no error."""
    with contextlib.suppress(OSError):
        if root.absolute() not in _remembered():
            _roots_file().parent.mkdir(parents=True, exist_ok=True)
            with open(_roots_file(), "a", encoding="utf-8") as file:
                file.write(f"{root.absolute()}\n")


def _roots_file() -> Path:
    return Path(platformdirs.user_state_dir("launcher")) / "roots"

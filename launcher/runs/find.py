"""Finding runs by id, prefix or path, from any directory."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from launcher.runs.layout import RunDir

SHOWN = 5
"Runs that a message names."


class RunNotFoundError(Exception):
    """No run, or several, answer to a name; the message lists what there is."""


@dataclass(frozen=True)
class SweepRuns:
    """The runs of a sweep that are still there, in the order of their values."""

    id: str
    runs: tuple[RunDir, ...]


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
    found = find(name)
    if isinstance(found, SweepRuns):
        raise RunNotFoundError(
            f"{name!r} is a sweep of {len(found.runs)} runs: name one of them, such as {found.runs[0].id}; "
            f"`launcher status {found.id}` shows them all"
        )
    return found


def find(name: str | None) -> RunDir | SweepRuns:
    """As `find_run`, or all runs of a sweep by its id or the beginning of it. Raises RunNotFoundError."""
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
        return _sweep(name, matches)
    known = ", ".join(run.id for run in runs[:SHOWN]) or "none"
    raise RunNotFoundError(f"no run {name!r}; the newest are: {known}")


def _sweep(name: str, matches: list[RunDir]) -> SweepRuns:
    """Raises RunNotFoundError where these are not all runs of one sweep whose id begins with `name`."""
    sweep = str(matches[0].read_about().get("sweep", {}).get("id", ""))
    if sweep.startswith(name) and all(_task(sweep, run) is not None for run in matches):
        return SweepRuns(sweep, tuple(sorted(matches, key=lambda run: _task(sweep, run) or 0)))
    raise RunNotFoundError(f"{name!r} is the beginning of several runs: {_some(matches)}")


def _task(sweep: str, run: RunDir) -> int | None:
    number = run.id.removeprefix(f"{sweep}-")
    return int(number) if number.isdigit() and number != run.id else None


def _some(runs: list[RunDir]) -> str:
    more = f" and {len(runs) - SHOWN} more" if len(runs) > SHOWN else ""
    return ", ".join(run.id for run in runs[:SHOWN]) + more


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

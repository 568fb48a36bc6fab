"""Find runs by id, prefix or path, from any directory."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from launcher.rundir.layout import RunDir
from launcher.spec import variables
from launcher.spec.errors import LauncherError
from launcher.spec.listed_names import listed
from launcher.spec.records import RunRecord

SHOWN = 5
"Number of runs that a message names."


class RunNotFoundError(LauncherError):
    """A name matches no run, or several; the message lists the existing ones."""


@dataclass(frozen=True)
class SweepRuns:
    """The runs of a sweep that still exist, in the order of their values."""

    id: str
    runs: tuple[RunDir, ...]


def default_root() -> Path:
    """`$LAUNCHER_RUNS`, otherwise `runs/` in the current directory."""
    return Path(os.environ.get(variables.RUNS, "runs"))


def open_run(path: Path) -> RunDir:
    """The run in a directory, or at the end of a link. Raises RunNotFoundError if there is none."""
    run = _at(path)
    if not {"id", "job"} <= run.read_about().as_json().keys():
        raise RunNotFoundError(f"{path} is not a run directory: it has no readable run.json of launcher")
    return run


def _at(path: Path) -> RunDir:
    """The run directory, under its own name: it is the run's id."""
    return RunDir((path.resolve() if path.is_symlink() else path).absolute())


def find_run(name: str | None, *, by_job: bool = False) -> RunDir:
    """Find a run by handle, path, id, or the beginning or end of an id. None is the newest of this project.

    With `by_job`, the name of a job means its newest run. Raises RunNotFoundError.
    """
    match = find(name, by_job=by_job)
    if isinstance(match, SweepRuns) and len(match.runs) == 1:
        return match.runs[0]
    if isinstance(match, SweepRuns):
        raise RunNotFoundError(
            f"{name!r} is a sweep of {len(match.runs)} runs: name one of them, such as {match.runs[0].id}; "
            f"`launcher status {match.id}` shows them all"
        )
    return match


def find(name: str | None, *, by_job: bool = False) -> RunDir | SweepRuns:
    """Like `find_run`, but also find a sweep by its id or its beginning. Raises RunNotFoundError."""
    if name is None:
        return _newest_of_project()
    if not name.strip():  # e.g. a shell variable that is not set
        raise RunNotFoundError(
            "the name is empty: name a run, or leave it out for the newest of this project"
        )
    path = Path(name.removeprefix("local:"))
    try:
        if (path / "run.json").is_file():
            return open_run(path)
    except PermissionError:
        raise _not_for_you(path) from None
    link = default_root() / name
    with contextlib.suppress(PermissionError):
        if link.is_symlink() and link.is_dir():  # such as `latest`
            return open_run(link)
    runs = runs_in()
    if ":" in name:  # a handle, because ids contain no colon
        matches = [run for run in runs if _has_handle(run, name)]
    else:
        matches = [run for run in runs if run.id == name] or [run for run in runs if run.id.startswith(name)]
        matches = matches or [run for run in runs if run.id.endswith(name)]
    if len(matches) == 1 and not _is_sweep_of(name, matches[0]):
        return matches[0]
    if by_job and (newest := _newest_of_job(name, runs)) is not None:
        return newest
    if matches:
        return _sweep(name, matches)
    for folder in (path, default_root() / name):
        try:
            has_events = (folder / "events.jsonl").is_file()
        except PermissionError:
            raise _not_for_you(folder) from None
        if has_events:
            raise RunNotFoundError(
                f"{folder} has no run.json, so it is no run: restore the file from a backup, or delete the "
                f"folder: rm -r {shlex.quote(str(folder))}"
            )
    if path.is_file():
        raise RunNotFoundError(
            f"{name} is a file and no run; the output of a program: launcher why --log {shlex.quote(name)}"
        )
    known = ", ".join(run.id for run in runs[:SHOWN]) or "none"
    raise RunNotFoundError(f"no run {name!r}; the newest are: {known}")


def _not_for_you(folder: Path) -> RunNotFoundError:
    return RunNotFoundError(
        f"{folder} belongs to another user and is not for you to read; its owner opens new runs by "
        "`paths: {access: group}` in the cluster profile"
    )


def newest_sweep() -> str:
    """The id of this project's newest sweep. Raises RunNotFoundError."""
    sweeps = (about.sweep for _, about in _of_project(runs_in()))
    newest = next((sweep.id for sweep in sweeps if sweep is not None), None)
    if newest is None:
        raise RunNotFoundError(f"no sweep was started in {Path.cwd()}; name one")
    return newest


def _of_project(runs: list[RunDir]) -> Iterator[tuple[RunDir, RunRecord]]:
    """Yield the readable runs that are in the folder for runs, or were started in the current directory."""
    root, here = default_root().absolute().resolve(), str(Path.cwd())
    for run in runs:
        about = run.read_about()
        if about.id is not None and (run.path.parent.resolve() == root or about.project_dir == here):
            yield run, about


def _newest_of_project() -> RunDir:
    """The newest run of this project, never one of another project. Raises RunNotFoundError."""
    runs = runs_in()
    if (newest := next(_of_project(runs), None)) is not None:
        return newest[0]
    root = default_root().absolute().resolve()
    damaged = next((run for run in runs if run.path.parent.resolve() == root), None)
    if damaged is not None:
        return damaged
    if not runs:
        raise RunNotFoundError("there is no run yet; start one with `launcher run JOB -c CLUSTER`")
    raise RunNotFoundError(
        f"no run was started in {Path.cwd()}; name a run of another project: the newest are "
        f"{_listed_ids(runs)}"
    )


def _newest_of_job(name: str, runs: list[RunDir]) -> RunDir | None:
    return next((run for run in runs if run.read_about().job.name == name), None)


def _has_handle(run: RunDir, handle: str) -> bool:
    """Whether this is a handle of the run, now or at an earlier start. Some handles end with the run's id."""
    if handle.rpartition(":")[2].removeprefix("run/") == run.id:
        return True
    return any(event.handle == handle for event in run.read_events())


def _sweep(name: str, matches: list[RunDir]) -> SweepRuns:
    """The sweep whose id begins with `name`. Raises RunNotFoundError if these are not all runs of one."""
    sweeps = (run.read_about().sweep for run in matches)  # None if the record is damaged
    sweep = next((record.id for record in sweeps if record is not None), "")
    if sweep.startswith(name) and all(_task(sweep, run) is not None for run in matches):
        return SweepRuns(sweep, tuple(sorted(matches, key=lambda run: _task(sweep, run) or 0)))
    part = "beginning" if matches[0].id.startswith(name) else "end"
    raise RunNotFoundError(f"{name!r} is the {part} of several runs: {_listed_ids(matches)}")


def _is_sweep_of(name: str, run: RunDir) -> bool:
    """Whether the name is the id of the run's sweep or its beginning."""
    sweep = run.read_about().sweep
    return sweep is not None and sweep.id.startswith(name) and _task(sweep.id, run) is not None


def _task(sweep: str, run: RunDir) -> int | None:
    number = run.id.removeprefix(f"{sweep}-")
    return int(number) if number.isdecimal() and number != run.id else None


def _listed_ids(runs: list[RunDir]) -> str:
    return listed([run.id for run in runs], SHOWN)


def runs_in(root: Path | None = None) -> list[RunDir]:
    """The runs below one root, or below all known ones, newest first."""
    roots = [root] if root is not None else known_roots()
    runs: dict[Path, RunDir] = {}
    for folder in roots:
        for entry in _entries(folder):
            with contextlib.suppress(OSError):  # another user's
                if not entry.name.startswith(".") and (entry / "run.json").is_file():
                    runs[entry.resolve()] = _at(entry)
    return sorted(runs.values(), key=_written_at, reverse=True)


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _written_at(run: RunDir) -> int:
    """When run.json was written, in ns; 0 if the run was deleted in the meantime."""
    try:
        return run.submitted.stat().st_mtime_ns
    except OSError:
        return 0


def latest_checkpoint(run: RunDir) -> int | None:
    """The step of the newest complete checkpoint (incomplete ones have another name)."""
    steps = []
    with contextlib.suppress(OSError):
        for entry in run.checkpoints.iterdir():
            prefix, _, number = entry.name.partition("-")
            if prefix == "step" and number.isdecimal():
                steps.append(int(number))
    return max(steps, default=None)


def remove_partial_checkpoints(run: RunDir) -> None:
    """Remove what killed ranks have left half-written. Call it while no checkpoint is being written."""
    for torn in run.checkpoints.glob(".step-*.partial"):
        shutil.rmtree(torn, ignore_errors=True)


def known_roots() -> list[Path]:
    """The current directory's runs first, then every folder in which a run was ever started."""
    return list(dict.fromkeys([default_root().absolute(), *_remembered_roots()]))


def _remembered_roots() -> list[Path]:
    try:
        text = _roots_file().read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return []
    return [Path(root) for line in text.split("\n") if (root := _root_of(line))]


def _line_of(root: Path) -> str:
    """The path unchanged, or as a JSON string if it contains characters that a line of text cannot hold."""
    text = str(root)
    return text if text.isprintable() else json.dumps(text)


def _root_of(line: str) -> str | None:
    """The folder in a line; None for a line without one, such as a truncated line."""
    root: object = line
    if line.startswith('"'):
        try:
            root = json.loads(line)
        except ValueError:
            return None
    return root if isinstance(root, str) and root.startswith("/") and "\0" not in root else None


def remember_root(root: Path) -> None:
    """Remember the root, so that a run is found from any directory. A read-only home is not an error."""
    with contextlib.suppress(OSError):
        if root.absolute() not in _remembered_roots():
            _roots_file().parent.mkdir(parents=True, exist_ok=True)
            with open(_roots_file(), "a", encoding="utf-8") as file:
                file.write(f"{_line_of(root.absolute())}\n")


def _roots_file() -> Path:
    return Path(platformdirs.user_state_dir("launcher")) / "roots"

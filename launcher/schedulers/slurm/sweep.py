"""Sweeps: many runs in one Slurm array."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.rundir.files import replace_text
from launcher.rundir.find import remember_root
from launcher.rundir.layout import RunDir
from launcher.schedulers.base import Prepared, PreparedSweep, SchedulerError
from launcher.schedulers.slurm.handle import Handle
from launcher.schedulers.slurm.jobs import NotSubmittedError, sbatch_command
from launcher.schedulers.slurm.scripts import array_script
from launcher.spec.events import Submitting

if TYPE_CHECKING:
    from launcher.schedulers.slurm.scheduler import SlurmScheduler

FOLDER = "sweeps"
"Folder in the runs' root: `sweeps/<id>/array.sbatch`, and a link `<task>` to each run's directory."


def prepare(
    sweep_id: str, runs: Sequence[tuple[Prepared, tuple[str, ...]]], at_once: int | None = None
) -> PreparedSweep:
    """Prepare one array for all runs. Each comes with the `--set` texts that distinguish it.

    At most `at_once` of them run at the same time. Raises SchedulerError if the runs do not fit into one
    array.
    """
    first = runs[0][0]
    folder = Path(first.run_dir).parent / FOLDER / sweep_id
    asked = _asked(first)
    for other, _ in runs[1:]:
        if _asked(other) != asked:
            different = sorted(set(asked) ^ set(_asked(other)))
            raise SchedulerError(
                "an array asks for the same resources for each of its tasks, but here "
                f"{', '.join(different)} differ: submit these apart"
            )
    array = array_script(first.target, sweep_id, str(folder), len(runs), at_once)
    tasks = [
        replace(
            prepared,
            about={**prepared.about, "sweep": {"id": sweep_id, "task": task, "values": list(values)}},
        )
        for task, (prepared, values) in enumerate(runs)
    ]
    command = sbatch_command(folder / array.path)
    return PreparedSweep(sweep_id, folder, tuple(tasks), array, command)


def _asked(prepared: Prepared) -> list[str]:
    """The run's sbatch options, without those that name the run and its files."""
    script = next(file.text for file in prepared.files if file.path == "job.sbatch")
    lines = re.findall(r"^#SBATCH --(.*)$", script, re.MULTILINE)
    return [line for line in lines if not line.startswith(("job-name=", "comment=", "output="))]


def submit(sweep: PreparedSweep, scheduler: SlurmScheduler) -> list[RunDir]:
    """Write and submit the runs.

    Raises SchedulerError; if there is certainly no job, nothing is left behind.
    """
    runs: list[RunDir] = []
    try:
        for prepared in sweep.runs:
            runs.append(scheduler.write(prepared))
    except OSError as error:
        raise SchedulerError(f"cannot write {sweep.runs[len(runs)].run_dir}: {error.strerror}") from None
    remember_root(runs[0].path.parent)
    for run in runs:
        run.append(Submitting())
    try:
        array = scheduler.send_array(sweep, runs)
    except NotSubmittedError:
        scheduler.withdraw(runs)
        raise
    cluster = sweep.runs[0].request.cluster.name
    handles = [str(Handle(cluster, f"{array}_{task}")) for task in range(len(runs))]
    for run, handle in zip(runs, handles, strict=True):
        scheduler.record(run, "submitted", handle, sweep.command)
    return runs


def write_folder(sweep: PreparedSweep, runs: Sequence[RunDir]) -> None:
    """Write the sweep's folder: the array script and a link to each run. Raises SchedulerError."""
    try:
        sweep.folder.mkdir(parents=True)
        for task, run in enumerate(runs):
            (sweep.folder / str(task)).symlink_to(Path("../..") / run.id)
        replace_text(sweep.folder / sweep.script.path, sweep.script.text, sweep.script.mode)
    except OSError as error:
        raise SchedulerError(f"cannot write {sweep.folder}: {error.strerror}") from None


def folder_text(sweep: PreparedSweep, runs: Sequence[RunDir]) -> str:
    """Shell that does the same as `write_folder`, and can be repeated."""
    ids = " ".join(shlex.quote(run.id) for run in runs)
    folder, script = shlex.quote(str(sweep.folder)), shlex.quote(sweep.script.text)
    return (
        f"(mkdir -p {folder} && cd {folder} || exit\n"
        f'i=0; for r in {ids}; do ln -sfn "../../$r" $i || exit; i=$((i + 1)); done\n'
        f"printf %s {script} >{sweep.script.path}) || exit\n"
    )


def forget(runs: Sequence[RunDir]) -> None:
    """Remove the links to runs that are about to be deleted, and the folder of a sweep that has no runs
    left."""
    for folder, tasks in _links(runs).items():
        for task in tasks:
            (folder / task).unlink(missing_ok=True)
        if folder.is_dir() and not any(entry.is_symlink() for entry in folder.iterdir()):
            shutil.rmtree(folder)


def forget_text(runs: Sequence[RunDir], root: str) -> str:
    """Shell that does the same as `forget` on the cluster, where the runs are in `root`."""
    return "".join(
        f"(cd {shlex.quote(str(folder))} 2>/dev/null || exit 0; rm -f {' '.join(tasks)}\n"
        f'for l in *; do [ ! -L "$l" ] || exit 0; done; cd .. && rm -rf {shlex.quote(folder.name)})\n'
        for folder, tasks in _links(runs, Path(root)).items()
    )


def _links(runs: Sequence[RunDir], root: Path | None = None) -> dict[Path, list[str]]:
    """Map the folder of each sweep to the names of the runs' links in it."""
    found: dict[Path, list[str]] = {}
    for run in runs:
        if sweep := run.read_about().get("sweep"):
            found.setdefault((root or run.path.parent) / FOLDER / sweep["id"], []).append(str(sweep["task"]))
    return found

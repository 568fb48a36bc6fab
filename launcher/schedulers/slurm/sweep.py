"""Sweeps: many runs in one Slurm array."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from launcher.rundir.layout import RunDir
from launcher.schedulers.base import Prepared, PreparedSweep, SchedulerError
from launcher.schedulers.slurm.jobs import sbatch_command

if TYPE_CHECKING:
    from launcher.schedulers.store import Store

FOLDER = "sweeps"
"Folder in the runs' root: `sweeps/<id>/array.sbatch`, and a link `<task>` to each run's directory."


def prepare_array(
    sweep_id: str, runs: Sequence[tuple[Prepared, tuple[str, ...]]], at_once: int | None = None
) -> PreparedSweep:
    """Prepare one array for all runs. Each comes with the `--set` texts that distinguish it.

    At most `at_once` of them run at the same time. Raises SchedulerError if the runs do not fit into one
    array.
    """
    from launcher.schedulers.slurm.scripts import array_script

    first = runs[0][0]
    folder = Path(first.run_dir).parent / FOLDER / sweep_id
    options = _sbatch_options(first)
    for other, _ in runs[1:]:
        if _sbatch_options(other) != options:
            different = sorted(set(options) ^ set(_sbatch_options(other)))
            raise SchedulerError(
                "an array asks for the same resources for each of its tasks, but here "
                f"{', '.join(different)} differ: submit these separately"
            )
    array = array_script(first.target, sweep_id, str(folder), len(runs), at_once)
    tasks = [prepared.in_sweep(sweep_id, task, values) for task, (prepared, values) in enumerate(runs)]
    command = sbatch_command(folder / array.path)
    return PreparedSweep(sweep_id, folder, tuple(tasks), array, command)


def _sbatch_options(prepared: Prepared) -> list[str]:
    """Return the run's sbatch options, without those that name the run and its files."""
    script = next(file.text for file in prepared.files if file.path == "job.sbatch")
    lines = re.findall(r"^#SBATCH --(.*)$", script, re.MULTILINE)
    return [line for line in lines if not line.startswith(("job-name=", "comment=", "output="))]


def folder_text(sweep: PreparedSweep, runs: Sequence[RunDir]) -> str:
    """Return shell that writes the sweep's folder: the array script and a link to each run. Repeatable."""
    ids = " ".join(shlex.quote(run.id) for run in runs)
    assert sweep.script is not None
    folder, script = shlex.quote(str(sweep.folder)), shlex.quote(sweep.script.text)
    return (
        f"(mkdir -p {folder} && cd {folder} || exit\n"
        f'i=0; for r in {ids}; do ln -sfn "../../$r" $i || exit; i=$((i + 1)); done\n'
        f"printf %s {script} >{sweep.script.path}) || exit\n"
    )


def forget_text(runs: Sequence[RunDir], store: Store) -> str:
    """Return shell that removes the links to these runs, and the folder of a sweep without remaining runs."""
    tasks_by_folder: dict[PurePosixPath, list[str]] = {}
    for run in runs:
        if (sweep := run.read_about().sweep) is not None:
            folder = PurePosixPath(store.path(run, run.path)).parent / FOLDER / sweep.id
            tasks_by_folder.setdefault(folder, []).append(str(sweep.task))
    return "".join(
        f"(cd {shlex.quote(str(folder))} 2>/dev/null || exit 0; rm -f {' '.join(tasks)}\n"
        f'for l in *; do [ ! -L "$l" ] || exit 0; done; cd .. && rm -rf {shlex.quote(folder.name)})\n'
        for folder, tasks in tasks_by_folder.items()
    )

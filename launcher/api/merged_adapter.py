"""Export a whole model, with the adapter that a run has trained merged into its weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from launcher.api.model_sources import inside, running_user_code
from launcher.rundir.layout import RunDir
from launcher.spec.errors import UsageError
from launcher.spec.recipe import Recipe
from launcher.train.adapters.frozen import FrozenWeights
from launcher.train.checkpoints.export import ExportError, export
from launcher.train.checkpoints.folder import read_marker

if TYPE_CHECKING:
    import torch


def export_merged(run: RunDir, checkpoint: Path, to: Path, dtype: torch.dtype | None) -> list[Path]:
    """Write the merged model of a run's checkpoint into the new or empty directory `to`.

    The task's code runs in this process, in the run's working directory, to create the frozen weights again.
    Return the weight files. Raises ExportError, TaskError, UserCodeError, UsageError, OSError.
    """
    about, to = run.read_about(), to.absolute()
    if not (marker := read_marker(checkpoint)):
        raise ExportError.reading(checkpoint)
    if marker.get("adapter") is None:
        raise ExportError(f"{run.id} was trained without an adapter: there is nothing to merge")
    workdir = Path(about.workdir or "")
    attempts = run.attempts() or [run.attempt(0)]  # the checkpoints may have been copied into a new directory
    recipe = Recipe.model_validate(run.read_recipe(attempts[-1]))
    # A later attempt may have another precision. Markers of earlier launchers do not name theirs.
    recipe = recipe.model_copy(update={"precision": marker.get("precision", recipe.precision)})
    if not workdir.is_dir():
        raise UsageError(f"workdir: {workdir} is not a directory here; the task is imported from it")
    job = about.job.validated()
    with running_user_code(f"task {job.task}", workdir):
        frozen = FrozenWeights(job, recipe, str(workdir))
    with inside(workdir):
        return export(checkpoint, to, dtype, frozen=frozen)

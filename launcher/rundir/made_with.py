"""Compare how a checkpoint was made, according to its marker, with the job that should continue from it.

If a marker from an older launcher lacks a field, it agrees with every value of that field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from launcher.rundir.files import read_json
from launcher.rundir.find import latest_checkpoint
from launcher.rundir.layout import RunDir
from launcher.spec.job import Job
from launcher.spec.optimizer_table import saved_as
from launcher.spec.recipe import Recipe

Marker = Mapping[str, Any]


def made_with(job: Job, recipe: Recipe, samples: int | None) -> dict[str, Any]:
    """The fields of a marker. `samples` is the size of the training data; None if it is not known."""
    adapter = None if job.adapter is None else job.adapter.model_dump(mode="json")
    named = {
        "optimizer": recipe.optimizer,
        "precision": recipe.precision,
        "embedding_states": recipe.embedding_states,
        "batch": job.batch.global_,
        "seed": job.train.seed,
        "adapter": adapter,
    }
    return named if samples is None else {**named, "samples": samples}


def why_not_from(marker: Marker, job: Job, recipe: Recipe, samples: int | None = None) -> str | None:
    """Why `job` cannot continue from the checkpoint under `recipe`, and what can; None if it can.

    `samples` is the size of the training data now; None if it is not known.
    """
    done = int(marker.get("step", 0))
    if job.steps is not None and done > job.steps:
        return (
            f"`steps` counts from the start of the run: {done} are done, it is {job.steps} now; "
            f"continue with `--set steps={done + job.steps}` for {job.steps} more"
        )
    steps_per_epoch = int(marker.get("samples", 0) if samples is None else samples) // job.batch.global_
    if job.epochs is not None and steps_per_epoch and done > job.epochs * steps_per_epoch:
        passes = -(-done // steps_per_epoch)
        return (
            f"`epochs` counts from the start of the run: {passes} are done or begun, it is {job.epochs} now; "
            f"continue with `--set epochs={passes + job.epochs}` for {job.epochs} more"
        )
    before = marker.get("optimizer", recipe.optimizer)
    if saved_as(before) != saved_as(recipe.optimizer):
        return (
            f"its optimizer states are those of {before}, recipe.optimizer is {recipe.optimizer} now; "
            f"continue with `--set recipe.optimizer={before}`, or submit the job again for another optimizer"
        )
    if (states := marker.get("embedding_states", "32-bit")) != recipe.embedding_states:
        return (
            f"the optimizer states of its embeddings are {states}, recipe.embedding_states is "
            f"{recipe.embedding_states} now; continue with `--set recipe.embedding_states={states}`, or "
            "submit the job again"
        )
    adapter = None if job.adapter is None else job.adapter.model_dump(mode="json")
    if (had := marker.get("adapter", adapter)) != adapter:
        return (
            f"it was trained with adapter: {json.dumps(had)}, and the job has {json.dumps(adapter)} now; "
            "continue with the earlier one, or submit the job again"
        )
    batch = marker.get("batch", job.batch.global_)
    if job.epochs is not None and batch != job.batch.global_:
        return (
            f"its steps took {batch} samples each, batch.global is {job.batch.global_} now, and with "
            "`epochs:` what is left cannot be counted in steps of another size; continue with "
            f"`--set batch.global={batch}`, or with `--set epochs=null --set steps=N`"
        )
    return None


def why_not_on(run: RunDir, job: Job, recipe: Recipe) -> str | None:
    """Like `why_not_from`, for the newest checkpoint of a run.

    If the checkpoint is on another host, only its step is known here.
    """
    step = latest_checkpoint(run)
    if step is None:
        return None
    name = f"step-{step:08d}"
    marker = {"step": step, **(read_json(run.checkpoints / name / "complete.json") or {})}
    reason = why_not_from(marker, job, recipe)
    return reason and f"{name} cannot be resumed from: {reason}"


def data_change(marker: Marker, job: Job, samples: int) -> str | None:
    """How the data has changed so that the samples come in another order; None if it has not."""
    changes = []
    if (before := marker.get("samples", samples)) != samples:
        changes.append(f"the training data has {samples} samples, it had {before}")
    if (seed := marker.get("seed", job.train.seed)) != job.train.seed:
        changes.append(f"train.seed is {job.train.seed}, it was {seed}")
    if not changes:
        return None
    return (
        f"{' and '.join(changes)}: from here on the samples come in another order, and which of them the "
        "training has seen is unknown"
    )

"""`launcher submit --sweep`: from texts on the command line to the runs of one array."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.cli.prepare import named_cluster, prepared, runs_root
from launcher.schedulers.base import Prepared, SchedulerError
from launcher.schedulers.prepare import new_run_id
from launcher.schedulers.registry import of_cluster, slurm_at
from launcher.schedulers.slurm.sweep import Sweep, combinations, prepare
from launcher.spec.job import Batch, Job, Training
from launcher.spec.load import read
from launcher.spec.recipe import RecipeChoice

SECTIONS = {"train": Training, "batch": Batch, "recipe": RecipeChoice}


def prepared_sweep(
    job_file: Path, cluster_name: str, sets: Sequence[str], sweeps: Sequence[str], at_once: int | None
) -> Sweep:
    """Raises SpecError, PlanRefusedError, RenderError, SchedulerError."""
    cluster = named_cluster(cluster_name)
    if not of_cluster(cluster).capabilities.arrays:
        raise SchedulerError(
            f"--sweep: {cluster.name} (scheduler: {cluster.scheduler}) has no queue in which the runs could "
            "wait; start them one after another, each with `launcher run JOB -c CLUSTER --set FIELD=VALUE`, "
            "which returns when the run has ended"
        )
    args = read(job_file, sets).data.get("args")
    chosen = combinations([_full(text, args if isinstance(args, Mapping) else {}) for text in sweeps])
    name = str(read(job_file, sets).data.get("name", "run"))
    sweep_id, root = new_run_id(f"{name}-sweep"), runs_root(cluster)
    width = len(str(len(chosen) - 1))
    runs: list[tuple[Prepared, tuple[str, ...]]] = []
    for task, values in enumerate(chosen):
        _, ready = prepared(job_file, cluster_name, [*sets, *values], root / f"{sweep_id}-{task:0{width}d}")
        runs.append((ready, values))
    return prepare(sweep_id, runs, at_once)


def _full(text: str, args: Mapping[str, Any]) -> str:
    """`lr=1,2` -> `train.lr=1,2`. Raises SchedulerError for a name that is nowhere, or in several places."""
    key, equals, values = text.partition("=")
    if "." in key or not equals:
        return text
    places = [name for name in _names(Job) if name == key]
    places += [f"{section}.{key}" for section, model in SECTIONS.items() if key in _names(model)]
    places += [f"args.{key}"] if key in args else []
    if len(places) == 1:
        return f"{places[0]}={values}"
    if places:
        raise SchedulerError(f"--sweep {text}: which one of {', '.join(places)}?")
    known = [*_names(Job), *args, *(name for model in SECTIONS.values() for name in _names(model))]
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "; write the whole path, such as args.width"
    raise SchedulerError(f"--sweep {text}: the job has no field {key!r}{hint}")


def _names(model: Any) -> list[str]:
    return [info.alias or name for name, info in model.model_fields.items()]


def submit_sweep(
    job_file: Path,
    cluster_name: str,
    sets: Sequence[str],
    sweeps: Sequence[str],
    at_once: int | None,
    dry_run: bool,
) -> None:
    from launcher.cli.output import console
    from launcher.report.terminal import show_plan, show_prepared
    from launcher.schedulers.slurm.sweep import submit

    sweep = prepared_sweep(job_file, cluster_name, sets, sweeps, at_once)
    first = sweep.runs[0]
    if dry_run:
        show_prepared(console(), first)
        print(f"\n# ==> {sweep.folder / sweep.array.path} <==\n{sweep.array.text}")
        print(f"{len(sweep.runs)} runs: {sweep.runs[0].request.run_id} .. {sweep.runs[-1].request.run_id}")
        return
    request = first.request
    scheduler = slurm_at(request.cluster.login, request.cluster.paths.runs)
    warnings = (*first.warnings, *scheduler.check(first))
    show_plan(console(), request.job, request.cluster, request.plan, warnings)
    handles = submit(sweep, scheduler)
    print(f"\n{len(handles)} runs submitted as one array ({handles[0].rpartition('_')[0]})")
    for ready, handle in zip(sweep.runs, handles, strict=True):
        print(f"{ready.request.run_id}  {handle}  {' '.join(ready.about['sweep']['values'])}")
    print(f"all of them: launcher status {sweep.id}    cancel: launcher cancel {sweep.id}")

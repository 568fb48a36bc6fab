"""Prepare and check the runs of a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from launcher.api.given_job import JobLike, as_given_job
from launcher.api.prepare import Limits, named_cluster, prepared, runs_root
from launcher.api.sweep_values import Field, combinations, field_of
from launcher.schedulers.base import Prepared, PreparedSweep, SchedulerError, Sweeping, warnings_of_runs
from launcher.schedulers.missing_files import check_workdir
from launcher.schedulers.prepare import new_run_id
from launcher.schedulers.registry import of_cluster
from launcher.spec.command import affects_ranks, environment_name, placeholder_of, uses
from launcher.spec.errors import UsageError
from launcher.spec.job import Batch, Job, Training
from launcher.spec.recipe import RecipeChoice
from launcher.spec.scheduler_section import fields_in
from launcher.spec.similar import did_you_mean

SECTIONS: dict[str, type[BaseModel]] = {"train": Training, "batch": Batch, "recipe": RecipeChoice}


def prepared_sweep(
    job: JobLike,
    cluster_name: str,
    sets: Sequence[str],
    sweeps: Sequence[str | Field],
    at_once: int | None,
    samples: int | None = None,
    seed: int = 0,
    limits: Limits | None = None,
) -> tuple[Sweeping, PreparedSweep]:
    """Prepare a run for each combination, as `sweep_values.combinations` explains. A text is `lr=1,2`.

    Raises SpecError, UsageError, PlanRefusedError, RenderError, SchedulerError."""
    cluster = named_cluster(cluster_name, sets)
    scheduler = of_cluster(cluster)
    if not isinstance(scheduler, Sweeping):
        raise SchedulerError(
            f"--sweep: the scheduler {cluster.scheduler} of {cluster.name} takes no sweeps; start each run "
            "by itself with `launcher run JOB -c CLUSTER --set FIELD=VALUE`, which returns when it ends"
        )
    data = as_given_job(job).document(sets).data
    args = data.get("args")
    fields = [_field(item, args if isinstance(args, Mapping) else {}) for item in sweeps]
    chosen = combinations(fields, samples, seed)
    name = str(data.get("name", "run"))
    sweep_id, root = new_run_id(f"{name}-sweep"), runs_root(cluster)
    width = len(str(len(chosen) - 1))
    runs: list[tuple[Prepared, tuple[str, ...]]] = []
    by_job: dict[str, tuple[str, ...]] = {}
    for task, values in enumerate(chosen):
        run_dir = root / f"{sweep_id}-{task:0{width}d}"
        _, ready = prepared(job, cluster_name, [*sets, *values], run_dir, limits)
        _check_differs(by_job.setdefault(_content(ready), values), values)
        runs.append((ready, values))
    first, values = runs[0]
    notes = [
        note
        for value in values
        if (note := _note_or_refuse(first.request.job, value.partition("=")[0])) is not None
    ]
    runs = [(replace(ready, warnings=(*ready.warnings, *notes)), values) for ready, values in runs]
    return scheduler, scheduler.prepare_sweep(sweep_id, runs, at_once)


def _content(ready: Prepared) -> str:
    return ready.request.job.model_dump_json() + ready.request.cluster.model_dump_json()


def _check_differs(earlier: tuple[str, ...], values: tuple[str, ...]) -> None:
    """Raise UsageError if an earlier run with other texts has the same job. Draws may repeat texts."""
    for first, second in zip(earlier, values, strict=True):
        if first != second:
            raise UsageError(f"--sweep: {first} and {second} are the same value; list it once")


def _field(field: str | Field, args: Mapping[str, Any]) -> Field:
    if isinstance(field, Field):
        return field._replace(name=_full_name(field.name, args))
    name, equals, values = field.partition("=")
    return field_of(f"{_full_name(name, args)}={values}" if name and equals else field)


def _full_name(name: str, args: Mapping[str, Any]) -> str:
    """`lr` -> `train.lr`. Raises UsageError for a name that does not exist or is ambiguous."""
    if "." in name:
        return name
    places = [field for field in fields_in(Job) if field == name]
    places += [f"{section}.{name}" for section, model in SECTIONS.items() if name in fields_in(model)]
    places += [f"args.{name}"] if name in args else []
    if len(places) == 1:
        return places[0]
    if places:
        raise UsageError(f"--sweep {name}: which one of {', '.join(places)}?")
    known = [*fields_in(Job), *args, *(field for model in SECTIONS.values() for field in fields_in(model))]
    hint = did_you_mean(name, known) or "write the whole path, such as args.width"
    raise UsageError(f"--sweep {name}: the job has no field {name!r}; {hint}")


def _note_or_refuse(job: Job, field: str) -> str | None:
    """Return a note if a command gets a swept field only in its environment, or None.

    Raises UsageError for a field that nothing reads, because all runs would be the same.
    """
    if job.command is None:
        return None
    if (placeholder := placeholder_of(field)) is not None:
        if uses(job.command, placeholder):
            return None
        name = environment_name(placeholder)
        return f"--sweep {field}: the command has no {{{placeholder}}}; it sees the values as ${name} only"
    if affects_ranks(field):
        return None
    name = field.rpartition(".")[2]
    raise UsageError(
        f"--sweep {field}: nothing reads it in a job with `command:`, so the runs would be the same; give the"
        f" values to the command's environment (--sweep env.{name.upper()}=...) and read them there"
    )


def checked_sweep(sweep: PreparedSweep, scheduler: Sweeping) -> tuple[str, ...]:
    """Check for what would fail. Return warnings. Raises SpecError, SchedulerError."""
    for prepared_run in sweep.runs:
        check_workdir(prepared_run.request)
    warnings = warnings_of_runs([(values, run.warnings) for values, run in sweep.by_values])
    return (*warnings, *scheduler.check_sweep(sweep))

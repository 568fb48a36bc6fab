"""Prepare a submission of an existing run, with changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.api.prepare import named_cluster, prepare, with_hardware
from launcher.api.submission_plan import planned
from launcher.planning.replanning import changes, no_higher
from launcher.rundir.layout import RunDir
from launcher.rundir.made_with import why_not_on
from launcher.rundir.model_properties import found_in_model
from launcher.schedulers.base import Prepared, Request, SchedulerError
from launcher.schedulers.lookup import scheduler_of
from launcher.schedulers.registry import scheduler_class
from launcher.spec.cluster import Cluster
from launcher.spec.job import Job
from launcher.spec.load import from_record


def prepared_again(run: RunDir, sets: Sequence[str], cluster_name: str | None) -> Prepared:
    """Plan the run again, with `sets` applied to its current job, on its own or another cluster.

    Write nothing.

    `about` of the result records the changes under `changed` and `set`. Raises SpecError, PlanRefusedError,
    RenderError, SchedulerError.
    """
    about, events = run.read_about(), run.read_events()
    job_before = about["job"]
    job_before = {**job_before, "model": {**job_before.get("model", {}), **found_in_model(events)}}
    job = from_record(Job, job_before, f"{run.id}/run.json", sets)
    if cluster_name is None:
        cluster = from_record(Cluster, about["cluster"], f"{run.id}/run.json", sets)
    else:
        cluster = with_hardware(named_cluster(cluster_name, sets), job)
        _same_place(run, about["cluster"], cluster)
    job_file, runs_root = Path(about["job_file"]), run.path.parent
    request = Request(
        job=job,
        job_file=job_file,
        cluster=cluster,
        plan=no_higher(planned(job, job_file, cluster, runs_root), events, sets),
        run_id=run.id,
        runs_root=runs_root,
        project_dir=Path(about.get("project_dir", ".")),
    )
    if job.task is not None and (reason := why_not_on(run, job, request.plan.recipe)):
        raise SchedulerError(reason)
    _, ready = prepare(request)
    changed = changes(
        {**job_before, "cluster": about["cluster"]["name"]}, {**ready.about["job"], "cluster": cluster.name}
    )
    record = {"created": about["created"], "changed": changed, "set": list(sets)}
    if about.get("sweep") is not None:
        record["sweep"] = about["sweep"]
    return replace(ready, about={**ready.about, **record})


def _same_place(run: RunDir, before: Mapping[str, Any], cluster: Cluster) -> None:
    """Require that the run directory stays where it is. Raises SchedulerError."""
    after = cluster.model_dump(mode="json", by_alias=True)
    places = [scheduler_class(profile["scheduler"]).place(profile) for profile in (before, after)]
    if places[0] != places[1]:
        where = scheduler_of(run).where(run)
        raise SchedulerError(
            f"{run.id} and its checkpoints are in {where}; the profile {cluster.name} has another login, "
            "other ssh.hosts or paths.runs: give a profile with the same ones, or submit the job again there"
        )

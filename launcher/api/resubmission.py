"""Prepare a submission of an existing run, with changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

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
from launcher.spec.records import ClusterRecord


def prepared_again(run: RunDir, sets: Sequence[str], cluster_name: str | None) -> Prepared:
    """Plan the run again, with `sets` applied to its current job, on its own or another cluster.

    Write nothing.

    `about` of the result records the changes under `changed` and `set`. Raises SpecError, PlanRefusedError,
    RenderError, SchedulerError.
    """
    about, events = run.read_about(), run.read_events()
    job_before = about.job.as_json()
    job_before |= {"model": {**job_before.get("model", {}), **found_in_model(events)}}
    job = from_record(Job, job_before, f"{run.id}/run.json", sets)
    if cluster_name is None:
        cluster = from_record(Cluster, about.cluster.as_json(), f"{run.id}/run.json", sets)
    else:
        cluster = with_hardware(named_cluster(cluster_name, sets), job)
        _same_place(run, about.cluster, cluster)
    job_file, runs_root = Path(about.job_file or ""), run.path.parent
    request = Request(
        job=job,
        job_file=job_file,
        cluster=cluster,
        plan=no_higher(planned(job, job_file, cluster, runs_root), events, sets),
        run_id=run.id,
        runs_root=runs_root,
        project_dir=Path(about.project_dir or "."),
    )
    if job.task is not None and (reason := why_not_on(run, job, request.plan.recipe)):
        raise SchedulerError(reason)
    _, ready = prepare(request)
    changed = changes(
        {**job_before, "cluster": about.cluster.name}, {**ready.about.job.as_json(), "cluster": cluster.name}
    )
    after = ready.about.replace(created=about.created, changed=changed, set=list(sets))
    return replace(ready, about=after.replace(sweep=about.sweep) if about.sweep is not None else after)


def _same_place(run: RunDir, before: ClusterRecord, cluster: Cluster) -> None:
    """Require that the run directory stays where it is. Raises SchedulerError."""
    profiles = (before, ClusterRecord.of_profile(cluster))
    places = [scheduler_class(profile.scheduler or "local").place(profile) for profile in profiles]
    if places[0] != places[1]:
        where = scheduler_of(run).where(run)
        raise SchedulerError(
            f"{run.id} and its checkpoints are in {where}; the profile {cluster.name} has another login, "
            "other ssh.hosts or paths.runs: give a profile with the same ones, or submit the job again there"
        )

"""Prepare a submission from a job and the name of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from launcher.api.given_job import GivenJob, JobLike, as_given_job
from launcher.api.submission_plan import planned
from launcher.planning.plan import PlanRefusedError
from launcher.render.shipped import clusters_dir
from launcher.rundir.find import default_root
from launcher.schedulers.base import Prepared, Request, Scheduler, SchedulerError
from launcher.schedulers.prepare import new_run_id
from launcher.schedulers.registry import of_cluster, scheduler_class
from launcher.spec.cluster import SECTIONS, Cluster
from launcher.spec.field_types import Override, given_as
from launcher.spec.find_cluster import cluster_folders, find_cluster
from launcher.spec.job import Job
from launcher.spec.load import load_cluster


def named_cluster(name: str, sets: Sequence[str] = ()) -> Cluster:
    """Load the profile and apply `sets` to it.

    Raises SpecError if it is unknown or invalid, SchedulerError for options of another scheduler.
    """
    file = find_cluster(str(name), cluster_folders(clusters_dir()))
    for section in SECTIONS:
        options = [text for text in sets if text.startswith(f"cluster.{section}.")]
        if options and (scheduler := load_cluster(file).scheduler) != section:
            message = f"{name} has scheduler: {scheduler}, which has no options of {section}"
            raise SchedulerError(f"{given_as(options[0])}: {message}")
    return load_cluster(file, sets)


def queue_sets(
    partition: str | None,
    account: str | None,
    qos: str | None,
    reservation: str | None,
    dependency: str | None,
    nodelist: str | None,
) -> list[str]:
    """Return the options of one submission as overrides."""
    options = {"partition": partition, "account": account, "qos": qos, "reservation": reservation}
    options |= {"extra.dependency": dependency, "extra.nodelist": nodelist}
    return [
        Override(f"cluster.slurm.{name}={value}", f"--{name.removeprefix('extra.')} {value}")
        for name, value in options.items()
        if value is not None
    ]


def with_hardware(cluster: Cluster, job: Job) -> Cluster:
    """Fill in `node.gpu: auto`. Raises SchedulerError."""
    return scheduler_class(cluster.scheduler).with_hardware(cluster, job)


def runs_root(cluster: Cluster) -> Path:
    """Return the folder for the cluster's run directories."""
    return Path(cluster.paths.runs).expanduser() if cluster.paths.runs else default_root()


def prepared(
    job_like: JobLike | GivenJob,
    cluster_name: str,
    sets: Sequence[str],
    run_dir: Path | None = None,
    limits: Limits | None = None,
) -> tuple[Scheduler, Prepared]:
    """Prepare a submission completely, without sending it. `run_dir` sets the run directory.

    Raises SpecError, PlanRefusedError, RenderError, SchedulerError.
    """
    source = as_given_job(job_like)
    job, job_file = source.job(sets), source.file
    cluster = within(limits or Limits(), with_hardware(named_cluster(cluster_name, sets), job))
    root = run_dir.parent if run_dir is not None else runs_root(cluster)
    run_id = run_dir.name if run_dir is not None else new_run_id(job.name)
    requests: list[Request] = []
    refusals: list[PlanRefusedError] = []
    section = cluster.section if job.resources.gpus_per_node != 0 else None
    for variant in (cluster, *(section.alternatives(cluster) if section is not None else ())):
        try:
            plan = planned(job, job_file, variant, root)
        except PlanRefusedError as error:
            refusals.append(error)
            continue
        requests.append(
            Request(
                job=job,
                job_file=job_file,
                cluster=variant,
                plan=plan,
                run_id=run_id,
                runs_root=root,
                project_dir=Path.cwd(),
            )
        )
    if not requests:
        raise refusals[0]
    return prepare(replace(requests[0], others=tuple(requests[1:])))


@dataclass(frozen=True)
class Limits:
    """Limits on what is rented, in USD per hour, USD and hours. None leaves the profile's value."""

    max_price: float | None = None
    budget: float | None = None
    max_hours: float | None = None
    unplanned: bool | None = None
    "Rent a GPU even if it is not known whether the job fits on it."


def within(limits: Limits, cluster: Cluster) -> Cluster:
    """Apply the limits to the profile. Raises SchedulerError if nothing is rented there."""
    overrides = {name: value for name, value in asdict(limits).items() if value is not None}
    if not overrides:
        return cluster
    section = cluster.section
    if section is None or not overrides.keys() <= type(section).model_fields.keys():
        options = ", ".join(f"--{name.replace('_', '-')}" for name in overrides)
        raise SchedulerError(f"{options}: nothing is rented on {cluster.name}; give a runpod profile")
    return cluster.model_copy(update={cluster.scheduler: section.model_copy(update=overrides)})


def prepare(request: Request) -> tuple[Scheduler, Prepared]:
    """Prepare a request. Raises RenderError, SchedulerError."""
    cluster, scheduler = request.cluster, of_cluster(request.cluster)
    if request.plan.layout.nodes > 1 and not scheduler.multi_node:
        raise SchedulerError(f"{cluster.name} is one machine; several nodes need another cluster")
    return scheduler, scheduler.prepare(request)

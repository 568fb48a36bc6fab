"""From the names on the command line to a prepared submission."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launcher.cli.planned import planned
from launcher.render.shipped import clusters_dir
from launcher.runs.find import default_root
from launcher.schedulers.base import Prepared, Request, Scheduler, SchedulerError
from launcher.schedulers.local import with_detected_gpus
from launcher.schedulers.prepare import new_run_id
from launcher.schedulers.registry import of_cluster
from launcher.spec.cluster import Cluster
from launcher.spec.find import cluster_folders, find_cluster
from launcher.spec.load import load_cluster, load_job


def named_cluster(name: str) -> Cluster:
    """Raises SpecError for an unknown or wrong profile."""
    return load_cluster(find_cluster(name, cluster_folders(clusters_dir())))


def runs_root(cluster: Cluster) -> Path:
    """Where its run directories are kept."""
    return Path(cluster.paths.runs).expanduser() if cluster.paths.runs else default_root()


def prepared(
    job_file: Path, cluster_name: str, sets: Sequence[str], run_dir: Path | None = None
) -> tuple[Scheduler, Prepared]:
    """Everything short of doing it. `run_dir` fixes where the run lies.

    Raises SpecError, PlanRefusedError, RenderError, SchedulerError.
    """
    job = load_job(job_file, sets)
    cluster = with_detected_gpus(named_cluster(cluster_name))
    root = run_dir.parent if run_dir is not None else runs_root(cluster)
    request = Request(
        job=job,
        job_file=job_file,
        cluster=cluster,
        plan=planned(job, job_file, cluster, root),
        run_id=run_dir.name if run_dir is not None else new_run_id(job.name),
        runs_root=root,
        project_dir=Path.cwd(),
    )
    return prepare(request)


def prepare(request: Request) -> tuple[Scheduler, Prepared]:
    """Raises RenderError, SchedulerError."""
    cluster, scheduler = request.cluster, of_cluster(request.cluster)
    if request.plan.layout.nodes > 1 and not scheduler.capabilities.multi_node:
        raise SchedulerError(f"{cluster.name} is one machine; several nodes need another cluster")
    return scheduler, scheduler.prepare(request)

"""Examine a cluster: submit the doctor's run like any other run, and collect its results."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher.api.command_job import job_of_command
from launcher.api.given_job import GivenJob, JobLike, as_given_job
from launcher.api.prepare import named_cluster, prepared, with_hardware
from launcher.doctor.examine import worst
from launcher.doctor.facts import Facts, facts_of
from launcher.doctor.job_needs import JobNeeds
from launcher.doctor.options import Options
from launcher.doctor.profile_change import difference, own_file, with_facts
from launcher.doctor.results import Results, results_of
from launcher.render.shipped import clusters_dir
from launcher.rundir.files import replace_text
from launcher.rundir.find import runs_in
from launcher.rundir.layout import RunDir
from launcher.schedulers.base import Request, SchedulerError
from launcher.schedulers.lookup import scheduler_of
from launcher.spec.errors import UsageError
from launcher.spec.find_cluster import cluster_folders, find_cluster
from launcher.spec.load import load_cluster
from launcher.spec.records import ClusterRecord

TAG = "doctor"
CPU_RANKS = 2
"Ranks on a node without GPUs: collectives need two."
TIME = {"quick": "10m", "standard": "20m", "thorough": "40m"}
"Time limit of the submission, by level."
POLL_SECONDS = 0.5


def submit_doctor(
    cluster: str,
    nodes: int | None = None,
    options: Options | None = None,
    sets: Sequence[str] = (),
    job: JobLike | None = None,
) -> tuple[RunDir, tuple[str, ...]]:
    """Submit the doctor's run. Return it with warnings of the cluster and of the job's plan.

    `sets` overrides fields of the run's job, and of the profile as `cluster.A.B=C`. With `job` they are
    fields of that job, and the doctor also examines whether it can start. Raises SpecError,
    PlanRefusedError, SchedulerError, UnclearError.
    """
    options = options or Options()
    plan_warnings: tuple[str, ...] = ()
    doctor_sets = [
        f"resources.time={TIME[options.level]}",
        "retries={lower: 0, same: 0, preemptions: 0, time_limits: 0}",
        "requeue=false",
        "cluster.checks=doctor",
    ]
    if job is not None:
        job_sets = [*([f"resources.nodes={nodes}"] if nodes is not None else []), *sets]
        scheduler, ready = prepared(job, cluster, job_sets)
        options = replace(
            options, job=JobNeeds.of(ready.request.job, ready.request.plan, ready.request.cluster)
        )
        plan_warnings = ready.request.plan.warnings
        doctor_sets += [text for text in job_sets if text.startswith("cluster.")]
        scheduler, ready = prepared(_doctor_job(ready.request, options), cluster, doctor_sets)
    else:
        doctor_sets += [f"resources.nodes={nodes or 1}"]
        doctor_sets += [] if _has_gpus(cluster, sets) else [f"resources.ranks_per_node={CPU_RANKS}"]
        chosen = [*doctor_sets, *sets]
        fields = {**job_of_command(options.command, cluster, chosen), "name": TAG, "tags": [TAG]}
        scheduler, ready = prepared(fields, cluster, chosen)
    warnings = (*plan_warnings, *scheduler.notes(ready.target), *scheduler.check(ready))
    return scheduler.submit(ready), warnings


def _doctor_job(request: Request, options: Options) -> GivenJob:
    """Return the doctor's job with the nodes, image, environment and secrets of another job."""
    layout = request.plan.layout
    fields = request.job.model_dump(mode="json", by_alias=True, exclude_unset=True)
    kept: dict[str, Any] = {
        name: fields[name] for name in ("env", "secrets", "send", "image", "workdir") if name in fields
    }
    node_counts = {"nodes": layout.nodes, "ranks_per_node": layout.ranks_per_node}
    doctor_fields = {
        "name": TAG,
        "tags": [TAG],
        "command": options.command,
        "batch": {"global": layout.ranks},
        "resources": {**fields.get("resources", {}), **node_counts, "gpus_per_node": layout.gpus_per_node},
    }
    return GivenJob(request.job_file, {**kept, **doctor_fields})  # paths begin in the folder of the job file


def _has_gpus(cluster: str, sets: Sequence[str]) -> bool:
    job = as_given_job({"name": TAG, "command": ["true"], "batch": {"global": 1}}).job()
    return with_hardware(named_cluster(cluster, sets), job).gpus_per_node > 0


def wait_for_start(run: RunDir) -> None:
    """Wait until the run leaves the queue. Raises SchedulerError if the cluster does not answer."""
    scheduler = scheduler_of(run)
    while scheduler.status(run).state == "submitted":
        time.sleep(POLL_SECONDS)


def wait_for_results(run: RunDir) -> Results:
    """Wait until the run has ended, and return its results. Raises SchedulerError as wait_for_start.

    If a node has died, cancel the run and do not wait for its end, because the run itself waits for the node.
    """
    scheduler = scheduler_of(run)
    while not scheduler.status(run).ended:
        if (results := collected(run, ended=False)).node_died:
            with suppress(SchedulerError):  # it has just ended
                scheduler.cancel(run)
            return results
        time.sleep(POLL_SECONDS)
    scheduler.fetch(run)
    return collected(run)


def collected(run: RunDir, *, ended: bool = True) -> Results:
    """Return the results of a doctor's run, so far if it has not `ended`.

    Raises UsageError if it is another run.
    """
    if (results := results_of(run, ended=ended)) is None:
        raise UsageError(f"{run.id} is not a run of `launcher doctor`")
    return results


@dataclass(frozen=True)
class Change:
    """A cluster profile with the setting that the doctor chose."""

    file: Path
    "The file to write: a shipped profile goes into the user's folder."
    text: str
    difference: str
    "A patch of the profile that is in force."


def changed_profile(results: Results, cluster: str) -> Change | None:
    """Return the profile with the chosen setting, and with the GPUs that were found if it names others.

    Return None if nothing changes. `cluster` is the profile's name or file. Raises SpecError if it does not
    exist, UsageError if it describes another cluster.
    """
    facts = facts_of(results)
    shipped = clusters_dir()
    file = find_cluster(cluster, cluster_folders(shipped))
    if (name := load_cluster(file).name) != results.cluster:
        raise UsageError(f"the run is of {results.cluster}, not of {name}: give -c {results.cluster}")
    before = file.read_text(encoding="utf-8")
    if not _corrects_gpu(results):
        facts = replace(facts, gpu_type="")
    if not facts:
        return None
    if (after := with_facts(before, facts)) == before:
        return None
    target = own_file(file, shipped)
    return Change(target, after, difference(before, after, str(target)))


def _corrects_gpu(results: Results) -> bool:
    """Return whether the GPUs differ from those of the profile."""
    return any(
        finding.check in ("gpu-name", "gpu-memory") and finding.verdict != "good"
        for finding in results.findings
    )


def found_earlier(describes: Callable[[ClusterRecord], bool]) -> Facts:
    """Return the facts that runs of the doctor on this machine have found about a cluster, newest run first.

    `describes` returns whether a profile describes that cluster.
    """
    facts = Facts()
    for run in runs_in():
        if describes(run.read_about().cluster) and (results := results_of(run)) is not None:
            facts = facts.or_else(facts_of(results))
    return facts


def write_profile(change: Change) -> None:
    """Write a changed profile. Raises SpecError if it would not be valid any more, OSError."""
    change.file.parent.mkdir(parents=True, exist_ok=True)
    trial = change.file.with_suffix(".doctor.yaml")
    try:
        replace_text(trial, change.text)
        load_cluster(trial)
    finally:
        trial.unlink(missing_ok=True)
    replace_text(change.file, change.text)


def last_healthy(results: Results) -> Results | None:
    """Return the newest earlier results of the same cluster in which nothing was broken, or None.

    Their level may differ. Findings about a job do not count.
    """
    for run in runs_in():
        if run.id == results.run.id or run.read_about().created > results.run.read_about().created:
            continue
        earlier = results_of(run)
        if earlier is None or earlier.unfinished or earlier.cluster != results.cluster:
            continue
        if worst(finding for finding in earlier.findings if finding.part != "job") != "broken":
            return earlier
    return None

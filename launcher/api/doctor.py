"""Examine a cluster: submit the doctor's run as a run like any other, and collect its results."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from launcher.api.command_job import job_of_command
from launcher.api.job_source import given
from launcher.api.prepare import named_cluster, prepared, with_hardware
from launcher.doctor.options import Options
from launcher.doctor.results import Results, results_of
from launcher.rundir.layout import RunDir
from launcher.schedulers.of_run import scheduler_of
from launcher.spec.errors import UsageError

TAG = "doctor"
CPU_RANKS = 2
"Ranks on a node without GPUs: collectives need two."
TIME = {"quick": "10m", "standard": "20m", "thorough": "40m"}
"Time limit of the submission, by level."
POLL_SECONDS = 0.5


def submit_doctor(
    cluster: str, nodes: int | None = None, options: Options | None = None, sets: Sequence[str] = ()
) -> tuple[RunDir, tuple[str, ...]]:
    """Submit the doctor's run. Return it with warnings of the cluster.

    `sets` overrides fields of the run's job, and of the profile as `cluster.A.B=C`. Raises SpecError,
    PlanRefusedError, SchedulerError, UnclearError.
    """
    options = options or Options()
    own = [
        f"resources.nodes={nodes or 1}",
        f"resources.time={TIME[options.level]}",
        "retries={lower: 0, same: 0, preemptions: 0, time_limits: 0}",
        "requeue=false",
        "cluster.checks=doctor",
    ]
    own += [] if _has_gpus(cluster, sets) else [f"resources.ranks_per_node={CPU_RANKS}"]
    chosen = [*own, *sets]
    job = {**job_of_command(options.command, cluster, chosen), "name": TAG, "tags": [TAG]}
    scheduler, ready = prepared(job, cluster, chosen)
    warnings = scheduler.check(ready)
    return scheduler.submit(ready), warnings


def _has_gpus(cluster: str, sets: Sequence[str]) -> bool:
    job = given({"name": TAG, "command": ["true"], "batch": {"global": 1}}).job()
    return with_hardware(named_cluster(cluster, sets), job).gpus_per_node > 0


def wait_for_results(run: RunDir, tell: Callable[[str], None] = lambda state: None) -> Results:
    """Wait until the run has ended, and return its results. `tell` hears each state.

    Raises SchedulerError if the cluster does not answer.
    """
    scheduler = scheduler_of(run)
    while not (now := scheduler.status(run)).ended:
        tell(now.state)
        time.sleep(POLL_SECONDS)
    scheduler.fetch(run)
    return collected(run)


def collected(run: RunDir) -> Results:
    """Return the results of a doctor's run. Raises UsageError for another run."""
    if (found := results_of(run)) is None:
        raise UsageError(f"{run.id} is not a run of `launcher doctor`")
    return found

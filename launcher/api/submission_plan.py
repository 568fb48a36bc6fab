"""Plan a submission. It is the decision of `launcher plan` if this command has stored its traces."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from launcher.memory.ledger import default_folder
from launcher.planning.earlier_runs import earlier_runs, started_where_it_fitted
from launcher.planning.plan import NotEstimatedError, Plan, PlanRefusedError, make_plan
from launcher.spec.cluster import Cluster
from launcher.spec.job import Job
from launcher.spec.progress import working


class NotPlannedError(Exception):
    """There are no stored traces of this model."""


def planned(job: Job, job_file: Path, cluster: Cluster, runs_root: Path) -> Plan:
    """Plan the job from stored traces, without importing torch or the user's code.

    A login node has neither the time nor the memory for that. If the traces are incomplete, the run decides:
    it uses its ladder if memory runs out. On a CPU the recipe is always the job's, and the traces only give
    the estimate. Raises PlanRefusedError.
    """
    ledger = default_folder(runs_root)
    plan = make_plan(job, cluster)
    on_gpu = plan.layout.gpus_per_node > 0
    measured = earlier_runs(job, cluster, ledger, on_gpu=on_gpu)
    plan = started_where_it_fitted(plan, job, cluster, measured)
    declared = job.plan.model is not None or job.plan.params is not None
    if not (job.task is not None or declared):
        return plan
    from launcher.api.model_sources import source_of, traces_dir
    from launcher.planning.recipe_and_ladder import Decider

    workdir = (job_file.parent / job.workdir).resolve()
    source = source_of(job, workdir, traces_dir(), "cuda" if on_gpu else "cpu", _no_traces)
    try:
        with working("choosing the recipe by memory" if on_gpu else "estimating the memory"):
            return Decider(job, cluster, source, ledger).decide(job.plan.vary).plan
    except (NotPlannedError, NotEstimatedError) as error:
        if not on_gpu:
            return plan
        why = "run `launcher plan` with this job and cluster once"
        if isinstance(error, NotEstimatedError):
            why = error.problems[0].message
        warning = f"the recipe is not chosen by memory: {why}"
    except PlanRefusedError as error:
        if cluster.rents:  # renting a GPU that is too small costs money
            raise
        warning = (
            f"according to its plan the job does not fit: "
            f"{'; '.join(problem.message for problem in error.problems)}"
        )
    return plan.model_copy(update={"warnings": (*plan.warnings, warning)})


def _no_traces() -> NoReturn:
    raise NotPlannedError

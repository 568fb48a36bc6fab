"""The plan that a submission takes: a decision of `launcher plan`, where it has left its traces."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from launcher.cli.sources import traces_dir
from launcher.memory.ledger import default_folder
from launcher.memory.store import TraceStore
from launcher.planning.cached import CachedSource
from launcher.planning.decide import Decider
from launcher.planning.plan import Plan, PlanRefusedError, make_plan
from launcher.spec.cluster import Cluster
from launcher.spec.job import Job

ASK = "the recipe is not chosen by memory: run `launcher plan` with this job and cluster once"


class NotPlannedError(Exception):
    """The traces of this model are not on disk."""


def planned(job: Job, job_file: Path, cluster: Cluster, runs_root: Path) -> Plan:
    """Never imports torch, nor the user's code: a login node has neither the time nor the memory. What the
    traces on disk do not tell is left to the run, which goes down its ladder when memory runs out.

    Raises PlanRefusedError.
    """
    plan = make_plan(job, cluster)
    if job.task is None or not plan.layout.gpus_per_node:
        return plan
    workdir = (job_file.parent / job.workdir).resolve()
    store = TraceStore(traces_dir(), job.task, job.args, str(workdir))
    try:
        source = CachedSource(store, _nothing_more)
        return Decider(job, cluster, source, default_folder(runs_root)).decide(job.plan.vary).plan
    except NotPlannedError:
        doubt = ASK
    except PlanRefusedError as error:
        doubt = f"by its plan the job does not fit: {'; '.join(one.message for one in error.problems)}"
    return plan.model_copy(update={"warnings": (*plan.warnings, doubt)})


def _nothing_more() -> NoReturn:
    raise NotPlannedError

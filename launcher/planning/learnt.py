"""A plan that is not chosen by memory, begun where an earlier run of the same job came to fit."""

from __future__ import annotations

from pathlib import Path

from launcher.memory.ledger import capacity_of, entries, family_of, too_large
from launcher.planning.plan import Plan
from launcher.spec.cluster import Cluster
from launcher.spec.job import Job


def begun_where_it_fitted(plan: Plan, job: Job, cluster: Cluster, ledger: Path) -> Plan:
    """As it is, where the job fixes its micro-batch or nothing is known."""
    on_gpu = plan.layout.gpus_per_node > 0
    family, capacity = family_of(job, cluster, on_gpu=on_gpu), capacity_of(job, cluster, on_gpu=on_gpu)
    if family is None or job.recipe.micro_batch_size is not None or job.recipe.grad_accum is not None:
        return plan
    known = [entry for entry in entries(ledger, family) if entry.args == job.args]
    rungs = (plan.recipe, *plan.ladder)
    found = [too_large(known, rung, plan.layout.ranks, capacity) for rung in rungs]
    start = next((at for at, entry in enumerate(found) if entry is None), len(rungs) - 1)
    if start == 0 or (entry := found[start - 1]) is None:
        return plan
    size = rungs[start].micro_batch_size
    reason = f"micro-batch {size}: memory ran out above it in {entry.run} on the same devices"
    return plan.model_copy(update={"recipe": rungs[start], "ladder": rungs[start + 1 :], "reason": reason})

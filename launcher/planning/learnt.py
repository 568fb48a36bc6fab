"""A plan that is not chosen by memory, begun where an earlier run of the same job came to fit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launcher.memory.ledger import Entry, capacity_of, entries, family_of, too_large
from launcher.planning.plan import Plan
from launcher.spec.cluster import Cluster
from launcher.spec.job import Job


def known_of(job: Job, cluster: Cluster, ledger: Path, *, on_gpu: bool) -> tuple[Entry, ...]:
    """What earlier runs of this very model have told, the oldest first."""
    family = family_of(job, cluster, on_gpu=on_gpu)
    found = entries(ledger, family) if family is not None else ()
    return tuple(entry for entry in found if entry.args == job.args)


def begun_where_it_fitted(plan: Plan, job: Job, cluster: Cluster, known: Sequence[Entry]) -> Plan:
    """As it is, where the job fixes its micro-batch or nothing is known."""
    fixed = job.recipe.micro_batch_size is not None or job.recipe.grad_accum is not None
    if fixed or not known:
        return plan
    capacity = capacity_of(job, cluster, on_gpu=plan.layout.gpus_per_node > 0)
    rungs = (plan.recipe, *plan.ladder)
    found = [too_large(known, rung, plan.layout.ranks, capacity) for rung in rungs]
    start = next((at for at, entry in enumerate(found) if entry is None), len(rungs) - 1)
    if start == 0 or (entry := found[start - 1]) is None:
        return plan
    size = rungs[start].micro_batch_size
    reason = f"micro-batch {size}: memory ran out above it in {entry.run} on the same devices"
    return plan.model_copy(update={"recipe": rungs[start], "ladder": rungs[start + 1 :], "reason": reason})

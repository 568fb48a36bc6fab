"""A plan that is not chosen by memory, begun where an earlier run of the same job came to fit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from launcher.memory.ledger import Entry, capacity_of, entries, family_of, too_large
from launcher.planning.plan import Plan
from launcher.spec.cluster import Cluster
from launcher.spec.job import Job
from launcher.spec.recipe import Recipe


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
    start, above, reason = begin(rungs, known, plan.layout.ranks, capacity)
    if start == 0:
        return plan
    lower = {"recipe": rungs[start], "ladder": rungs[start + 1 :], "above": above, "reason": reason}
    return plan.model_copy(update=lower)


class Begin(NamedTuple):
    at: int
    above: tuple[Recipe, ...]
    "Those before it that the run tries again: one earlier run alone ran out of memory under them."
    reason: str


def begin(rungs: Sequence[Recipe], known: Sequence[Entry], ranks: int, capacity: int | None) -> Begin:
    """With which of these, in falling order of their memory, a run begins: the first that is not known to be
    too large, else the last."""
    found = [too_large(known, rung, ranks, capacity) for rung in rungs]
    start = next((at for at, runs in enumerate(found) if not runs), len(rungs) - 1)
    if start == 0:
        return Begin(0, (), "")
    above = tuple(rung for rung, runs in zip(rungs, found[:start], strict=False) if len(runs) == 1)
    size, runs = rungs[start].micro_batch_size, " and ".join(entry.run for entry in found[start - 1][:2])
    reason = f"micro-batch {size}: memory ran out above it in {runs} on the same devices"
    return Begin(start, above, reason + (", which the run tries again when nothing fails" if above else ""))

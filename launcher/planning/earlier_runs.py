"""Start a plan that has no estimate at the recipe that fitted in earlier runs of the same job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from launcher.memory.ledger import Entry, capacity_of, entries, family_of, too_large
from launcher.planning.plan import Plan
from launcher.rundir.versions import version_of
from launcher.spec.cluster import Cluster
from launcher.spec.job import Job
from launcher.spec.recipe import Recipe


def earlier_runs(job: Job, cluster: Cluster, ledger: Path, *, on_gpu: bool) -> tuple[Entry, ...]:
    """Return the ledger's entries for this model and these arguments, the oldest first."""
    family = family_of(job, cluster, version_of("torch"), on_gpu=on_gpu)
    found = entries(ledger, family) if family is not None else ()
    return tuple(entry for entry in found if entry.args == job.shaped_by)


def started_where_it_fitted(plan: Plan, job: Job, cluster: Cluster, earlier: Sequence[Entry]) -> Plan:
    """Return the plan, starting at the first rung that is not known to be too large.

    The plan is unchanged if the job fixes its micro-batch or if there are no entries.
    """
    fixed = job.recipe.micro_batch_size is not None or job.recipe.grad_accum is not None
    if fixed or not earlier:
        return plan
    capacity = capacity_of(job, cluster, on_gpu=plan.layout.gpus_per_node > 0)
    rungs = (plan.recipe, *plan.ladder)
    start, above, reason = starting_rung(rungs, earlier, plan.layout.ranks, capacity)
    if start == 0:
        return plan
    lower = {"recipe": rungs[start], "ladder": rungs[start + 1 :], "above": above, "reason": reason}
    return plan.model_copy(update=lower)


class Start(NamedTuple):
    at: int
    above: tuple[Recipe, ...]
    "Larger recipes that the run tries again: only one earlier run ran out of memory under them."
    reason: str


def starting_rung(
    rungs: Sequence[Recipe], earlier: Sequence[Entry], ranks: int, capacity: int | None
) -> Start:
    """Choose the rung that a run starts with: the first that is not known to be too large, else the last.

    `rungs`: in falling order of their memory.
    """
    failed_runs = [too_large(earlier, rung, ranks, capacity) for rung in rungs]
    start = next((at for at, runs in enumerate(failed_runs) if not runs), len(rungs) - 1)
    if start == 0:
        return Start(0, (), "")
    above = tuple(rung for rung, runs in zip(rungs, failed_runs[:start], strict=False) if len(runs) == 1)
    size, runs = (
        rungs[start].micro_batch_size,
        " and ".join(entry.run for entry in failed_runs[start - 1][:2]),
    )
    reason = f"micro-batch {size}: larger ones ran out of memory in {runs} on the same devices"
    return Start(start, above, reason + ("; the run tries them again if nothing fails" if above else ""))

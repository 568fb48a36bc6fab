"""Compute the maximum cost and running time of rented pods."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launcher.planning.cost import hours, usd

if TYPE_CHECKING:
    from launcher.schedulers.runpod.profile import RunPod
    from launcher.spec.job import Job


def worst_case(
    section: RunPod, job: Job, nodes: int, price: float | None, dearest: tuple[float, int] | None
) -> tuple[float | None, str]:
    """Return the worst-case cost in USD (None if unlimited or unknown) and an explanation.

    It covers every pod that the run rents without another command from you.
    """
    seconds = max_seconds(section, job)
    limit = "resources.time" if seconds == job.resources.time else _named(section, "max_hours")
    first, paid = price, seconds
    if dearest is not None:
        price, paid = dearest
    elif price is not None:
        paid = affordable(section, price, seconds, 0.0)
    if paid < seconds:
        seconds, limit = paid, "what the budget pays for"
    pods = 1 + job.retries.preemptions if section.bid_per_gpu is not None and job.requeue else 1
    most = f"{hours(seconds / 3600)} ({limit})"
    if pods > 1 and section.budget is None:
        most = f"{pods} pods of {most} each, one after the other (retries.preemptions)"
    if (why := no_server_limit(section, nodes)) is not None:
        day = "its hourly price" if price is None else f"{usd(24 * price)} a day"
        return None, (
            f"no limit ({why}): {most} if the start script runs; if it never runs, the pod costs {day} "
            "until `launcher status` or `launcher runpod leaks --end` ends it"
        )
    if price is None and section.max_price is not None:
        price, most = section.max_price, f"{most} at max_price"
    elif price is not None and price != first:
        most = f"{most} at the most expensive offer, {usd(price)}/h"
    total = None if price is None else price * seconds / 3600 * pods
    if section.budget is not None and (total is None or total > section.budget):
        total, most = section.budget, f"{most}, limited by the budget"
    if total is None:
        return None, f"not known without a price: {most}, then RunPod itself ends the pod"
    return total, f"{most}, then RunPod itself ends the pod"


def no_server_limit(section: RunPod, nodes: int) -> str | None:
    """Return why RunPod itself does not end the pods at their time limit; None if it does."""
    if nodes > 1:
        return "RunPod has no time limit for a cluster of pods"
    if not section.server_limit and section.bid_per_gpu is None:
        return "server_limit: false"
    return None


def max_seconds(section: RunPod, job: Job) -> int:
    """Return the time limit of one pod: max_hours, or the job's own time limit if that is shorter."""
    seconds = int(section.max_hours * 3600)
    return seconds if job.resources.time is None else min(seconds, job.resources.time)


def affordable(section: RunPod, usd_per_hour: float, seconds: int, spent: float) -> int:
    """Return how many of `seconds` the budget pays for. `spent` is the USD cost of the run's earlier pods."""
    if section.budget is None or not usd_per_hour:
        return seconds
    return max(0, min(seconds, int((section.budget - spent) / usd_per_hour * 3600)))


def _named(section: RunPod, field: str) -> str:
    return field if field in section.model_fields_set else f"{field}, by default"

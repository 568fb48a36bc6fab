"""The cost of a job on hardware that is paid by the hour. All such numbers are computed here."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from launcher.spec.quantities import format_duration

if TYPE_CHECKING:
    from launcher.planning.plan import Plan
    from launcher.spec.cluster import Cluster
    from launcher.spec.job import Job


@dataclass(frozen=True)
class Offered:
    """The provider's offers: the one that is rented first, and the most expensive one."""

    what: str
    usd_per_hour: float
    "Price of all pods together."
    dearest_per_hour: float
    "Price in USD of the offer that can cost the most. It is rented if RunPod refuses the others."
    dearest_seconds: int
    "Time limit of one pod of that offer."


@dataclass(frozen=True)
class Cost:
    """USD and hours of the whole job. None: unknown, for the reason given by a text field."""

    usd_per_hour: float | None
    price: str
    "Source of the price, or why it is unknown."
    hours: float | None
    "Predicted time."
    hours_unknown: str
    "Why no time is predicted; empty if a time is predicted."
    usd: float | None
    "Predicted cost."
    worst_usd: float | None
    worst: str
    "What limits the cost, or why there is no limit."

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def rows(self) -> list[tuple[str, str]]:
        """Return pairs of (label, value) in plain text, which every verb that rents shows first."""
        price = self.price if self.usd_per_hour is None else f"{usd(self.usd_per_hour)}/h ({self.price})"
        total = "not known" if self.usd is None else usd(self.usd)
        worst = self.worst if self.worst_usd is None else f"{usd(self.worst_usd)}: {self.worst}"
        return [
            ("price", price),
            (
                "predicted time",
                f"not known: {self.hours_unknown}" if self.hours is None else hours(self.hours),
            ),
            ("predicted total", total),
            ("worst case", worst),
        ]


def cost_of(job: Job, cluster: Cluster, plan: Plan, offered: Offered | None = None) -> Cost | None:
    """Return the cost, or None if nothing is paid by the hour.

    Without `offered`, the price comes from the profile.
    """
    if not cluster.rents and cluster.usd_per_gpu_hour is None:
        return None
    price, source = _price(cluster, plan, offered)
    predicted = hours_of(job.steps, job.batch.global_, plan.samples_per_second)
    if cluster.section is not None and cluster.rents:
        dearest = None if offered is None else (offered.dearest_per_hour, offered.dearest_seconds)
        worst, why = cluster.section.worst_case(job, plan.layout.nodes, price, dearest)
    else:
        worst, why = _worst_elsewhere(job, cluster, price)
    return Cost(
        usd_per_hour=price,
        price=source,
        hours=predicted,
        hours_unknown="" if predicted is not None else _why_no_time(job, plan),
        usd=None if predicted is None or price is None else predicted * price,
        worst_usd=worst,
        worst=why,
    )


def _price(cluster: Cluster, plan: Plan, offered: Offered | None) -> tuple[float | None, str]:
    if offered is not None:
        return offered.usd_per_hour, offered.what
    if not plan.layout.gpus_per_node:
        return None, "not known: the profile's price is that of a GPU, and the job uses none"
    if plan.usd_per_hour is not None:
        return plan.usd_per_hour, "from the profile"
    ask = cluster.section.asks_price if cluster.section is not None else ""
    return None, f"not known: the profile {cluster.name} has no usd_per_gpu_hour{ask}"


def _why_no_time(job: Job, plan: Plan) -> str:
    if job.steps is None:
        return "`steps` is not set"
    if not plan.layout.gpus_per_node:
        return "no speed is predicted for a CPU"
    if plan.estimate is None and job.task is not None:
        return "this job and cluster have not been planned yet: run `launcher plan` once"
    if plan.estimate is None:
        return "the model of a command is not known (plan.model, plan.params)"
    return "the speed of this GPU is not known"


def _worst_elsewhere(job: Job, cluster: Cluster, price: float | None) -> tuple[float | None, str]:
    if job.resources.time is None:
        return None, "no limit: resources.time is not set"
    requeued = job.retries.time_limits + job.retries.preemptions
    requeues = cluster.section is not None and cluster.section.requeues and job.requeue
    jobs = 1 + requeued if requeues else 1
    each = f"{format_duration(job.resources.time)} (resources.time)"
    why = each if jobs == 1 else f"{jobs} jobs of {each} each, one after the other (retries)"
    if price is None:
        return None, f"not known without a price: {why}"
    return price * jobs * job.resources.time / 3600, why


def hours_of(steps: int | None, batch: int, samples_per_second: float | None) -> float | None:
    if steps is None or not samples_per_second:
        return None
    return steps * batch / samples_per_second / 3600


def hours(number: float) -> str:
    return f"{number:,.0f} h" if number >= 100 else f"{number:.3g} h"


def usd(amount: float) -> str:
    """Format an amount with cents, or with two digits if it is below one cent."""
    return f"{amount:.2f} USD" if amount >= 0.01 or not amount else f"{amount:.2g} USD"

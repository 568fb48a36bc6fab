"""Find the offers that may be rented for a run, cheapest first, and why other GPU types are left out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import AliasPath, Field

from launcher.planning import cost
from launcher.rundir.time import seconds_of
from launcher.schedulers.base import SchedulerError
from launcher.schedulers.runpod.errors import ApiError
from launcher.schedulers.runpod.evidence import ASKED
from launcher.schedulers.runpod.pods import Answer, Id, Money, Name, get
from launcher.spec.events import (
    DuplicateEnded,
    Event,
    Finished,
    Rejected,
    RejectedEnded,
    Rental,
    Submitting,
    SupervisorStarted,
)
from launcher.spec.quantities import format_duration

if TYPE_CHECKING:
    from launcher.schedulers.runpod.api import Client
    from launcher.schedulers.runpod.profile import RunPod

S3_CENTRES = (
    *("EU-CZ-1", "EU-RO-1", "EUR-IS-1", "EUR-NO-1", "US-CA-2", "US-GA-2", "US-IL-1", "US-KS-2", "US-MD-1"),
    *("US-MO-1", "US-MO-2", "US-NC-1", "US-NC-2", "US-NE-1", "US-WA-1"),
)
"Data centres whose network volumes have an S3 API (RunPod's documentation, 2026-08)."
DISK = 0.10 / (30 * 24)
"USD per GB and hour of a running pod's own disk (RunPod's documentation of prices: 0.10 per GB and month)."
SHORTEST = 600
"Minimum seconds that a budget must pay for. A shorter time would be spent pulling the image."
CLOUD = "SECURE"
"The only cloud with network volumes, which every run needs."
Stock = Literal["NONE", "LOW", "MEDIUM", "HIGH"]
_STOCK: dict[Stock, int] = {"HIGH": 0, "MEDIUM": 1, "LOW": 2, "NONE": 3}


class DataCenter(Answer):
    """A data centre and its stock of one GPU type or CPU flavor."""

    id: Name
    availability: Stock


class GpuType(Answer):
    id: Name
    secure: bool
    price: Money = Field(validation_alias=AliasPath("price", "secure"))
    "USD per hour of one GPU."
    max_count: int = Field(validation_alias=AliasPath("maxCount", "secure"))
    data_centers: list[DataCenter] = Field([], validation_alias="dataCenters")


class GpuTypes(Answer):
    gpus: list[GpuType]


class CpuType(Answer):
    id: Name
    ram_gb_per_vcpu: float = Field(gt=0, allow_inf_nan=False, validation_alias="ramGbPerVcpu")
    usd_per_vcpu: Money = Field(validation_alias=AliasPath("price", "securePerVcpu"))
    data_centers: list[DataCenter] = Field([], validation_alias="dataCenters")


class CpuTypes(Answer):
    cpus: list[CpuType]


class Volume(Answer):
    id: Id
    data_center: str = Field(pattern=r"^[A-Za-z0-9-]{1,40}$", validation_alias="dataCenter")


@dataclass(frozen=True)
class Need:
    """What a run needs if it gets this GPU type. `gpu_id` is None for a CPU pod."""

    gpu_id: str | None
    gpus: int
    "Per pod."
    nodes: int
    hours: float | None
    "Predicted hours for the whole job."
    host_gb: int | None = None
    "Minimum host memory of a pod with GPUs, in GB (10^9 bytes), or None if any will do."


@dataclass(frozen=True)
class Offer:
    """A GPU type or CPU flavor in one data centre that may be rented for a run."""

    need: Need
    data_center: str | None
    stock: Stock
    usd_per_hour: float
    "Price of all pods of the run together."
    max_seconds: int
    ram_gb: float | None = None
    "Host memory of a CPU pod in GB. GraphQL's instance id contains it."

    @property
    def usd(self) -> float | None:
        """Predicted USD for the whole job, or None."""
        return None if self.need.hours is None else self.usd_per_hour * self.need.hours

    def unfinished(self, budget: float | None) -> str | None:
        """Return why the job will not finish within one pod's hours or the rest of the budget, or None."""
        hours, limit = self.need.hours, self.max_seconds / 3600
        if hours is None or self.usd is None or hours <= limit:
            return None
        if budget is not None and self.usd > budget:
            figures = f"{cost.usd(self.usd)} predicted, {cost.usd(budget)} allowed"
            return f"will not finish within the budget: {figures}"
        resumes = math.ceil(hours / limit) - 1
        times = f"{resumes:,} resume{'s' if resumes > 1 else ''}"
        return f"will not finish within {cost.hours(limit)}: {times} with `launcher resume`"

    @property
    def place(self) -> str:
        """Description of the hardware and its location."""
        what = f"{self.need.gpus} x {self.need.gpu_id}" if self.need.gpu_id else "CPU pod"
        if self.need.nodes > 1:
            what = f"{self.need.nodes} pods of {what}"
        if self.need.host_gb is not None:
            what = f"{what} with at least {self.need.host_gb:,} GB of host memory"
        return f"{what}, {CLOUD}, {self.data_center or 'any data centre'}, stock {self.stock}"

    def __str__(self) -> str:
        hours = self.max_seconds / 3600
        most = f"at most {cost.hours(hours)}, {cost.usd(self.usd_per_hour * hours)}"
        if self.usd is not None and self.need.hours is not None:
            most = f"about {cost.hours(self.need.hours)}, {cost.usd(self.usd)} predicted; {most}"
        return f"{self.place}: {self.usd_per_hour:.3f} USD/h; {most}"


@dataclass(frozen=True)
class Market:
    """What can be rented for a run."""

    offers: tuple[Offer, ...]
    left_out: tuple[str, ...]
    "Lines about what cannot be rented, each with the reason."
    data_center: str | None
    "Data centre of the volume, or None if RunPod does not report it."
    budget_spent: bool = False
    "Whether there are no offers and the spent budget is one of the reasons."

    @property
    def offered(self) -> cost.Offered | None:
        """Cost of a run with these offers, or None if there are none."""
        if not self.offers:
            return None
        most_expensive = max(self.offers, key=lambda offer: offer.usd_per_hour * offer.max_seconds)
        return cost.Offered(
            what=self.offers[0].place,
            usd_per_hour=self.offers[0].usd_per_hour,
            dearest_per_hour=most_expensive.usd_per_hour,
            dearest_seconds=most_expensive.max_seconds,
        )


class NotOfferedError(Exception):
    """A GPU type or CPU flavor cannot be rented. The message says why."""


def query_market(
    client: Client, section: RunPod, needs: Sequence[Need], seconds: int, spent: float = 0.0
) -> Market:
    """Return what can be rented.

    `seconds` is the time limit of one pod, `spent` the USD cost of the run's earlier pods. Raises ApiError,
    and SchedulerError if the profile contradicts itself.
    """
    centre = volume_centre(client, section)
    offers: list[Offer] = []
    left_out: list[str] = []
    budget_too_small = False
    for need in needs if CLOUD in section.clouds else ():
        what = need.gpu_id or section.cpu_id
        try:
            places, price, ram = (_gpu if need.gpu_id else _cpu)(client, section, need)
            places = _in_stock(places, section, centre)
        except NotOfferedError as why:
            left_out.append(f"{what}: {why}")
            continue
        price = (price + section.disk_gb * DISK) * need.nodes
        limit = section.affordable(price, seconds, spent)
        if section.max_price is not None and price > section.max_price:
            left_out.append(f"{what}: {price:.3f} USD/h is above the {section.max_price:g} of max_price")
        elif limit < (least := min(SHORTEST, seconds)):
            budget_too_small = True
            left_out.append(
                f"{what}: the rest of the budget pays for {format_duration(limit)}, "
                f"and launcher rents for at least {format_duration(least)}"
            )
        else:
            offers += [Offer(need, p.id or None, p.availability, price, limit, ram) for p in places]
    if "COMMUNITY" in section.clouds:
        left_out.append("COMMUNITY: every run needs a network volume, which RunPod offers in SECURE only")
    return Market(ordered(offers), tuple(dict.fromkeys(left_out)), centre, budget_too_small and not offers)


def ordered(offers: Sequence[Offer]) -> tuple[Offer, ...]:
    """Sort offers by the cost of the whole job, or per hour if that is not known for all; then by stock."""
    predicted = all(offer.usd is not None for offer in offers)

    def rank(offer: Offer) -> tuple[float, int]:
        return (offer.usd or 0.0) if predicted else offer.usd_per_hour, _STOCK[offer.stock]

    return tuple(sorted(offers, key=rank))


def volume_centre(client: Client, section: RunPod) -> str | None:
    """Return the volume's data centre, where its pods must be; None if unknown. Raises SchedulerError."""
    if section.volume_id is None:
        return None
    what = f"/network-volumes/{section.volume_id}"
    try:
        centre = get(client, Volume, what).data_center
    except ApiError as error:
        if error.status == 404:
            raise SchedulerError(
                f"runpod.volume_id: this account has no network volume {section.volume_id}"
            ) from None
        if error.status != 403:
            raise
        return section.data_centers[0] if len(section.data_centers) == 1 else None
    if section.data_centers and centre not in section.data_centers:
        raise SchedulerError(
            f"runpod.data_centers: the volume {section.volume_id} is in {centre}, so its pods must be too"
        )
    return centre


def _in_stock(places: Sequence[DataCenter], section: RunPod, centre: str | None) -> Sequence[DataCenter]:
    """Return the permitted data centres that have stock. Raises NotOfferedError."""
    wanted = {centre} if centre is not None else set(section.data_centers)
    chosen = [
        place for place in places if (not wanted or place.id in wanted) and place.availability != "NONE"
    ]
    if not chosen:
        raise NotOfferedError(f"none in stock in {', '.join(sorted(wanted)) or 'any data centre'}")
    return chosen


def _gpu(client: Client, section: RunPod, need: Need) -> tuple[Sequence[DataCenter], float, None]:
    """Return the data centres and the USD per hour of one GPU pod. Raises NotOfferedError, ApiError."""
    params = {
        "include": "AVAILABILITY",
        "product": "CLUSTER" if need.nodes > 1 else "POD",
        "count": str(need.gpus),
        "cloud": CLOUD,
    }
    if section.cuda_versions and need.nodes == 1:
        params["cudaVersions"] = ",".join(section.cuda_versions)
    types = get(client, GpuTypes, "/catalog/gpus", **params).gpus
    gpu_type = next((gpu for gpu in types if gpu.id == need.gpu_id), None)
    if gpu_type is None:
        near = ", ".join(gpu.id for gpu in types[:5])
        raise NotOfferedError(f"RunPod's catalogue has no such GPU type; it has {near} ...")
    if not gpu_type.secure:
        raise NotOfferedError(f"not offered in the cloud {CLOUD}")
    if gpu_type.max_count < need.gpus:
        raise NotOfferedError(f"a pod can have at most {gpu_type.max_count} of them")
    return gpu_type.data_centers, (section.bid_per_gpu or gpu_type.price) * need.gpus, None


def _cpu(client: Client, section: RunPod, need: Need) -> tuple[Sequence[DataCenter], float, float]:
    """Return the data centres, USD per hour and GB of host memory of one CPU pod.

    Raises NotOfferedError, ApiError.
    """
    vcpu = section.vcpu or 0
    params = {"include": "AVAILABILITY", "product": "POD", "vcpuCount": str(vcpu)}
    types = get(client, CpuTypes, "/catalog/cpus", **params).cpus
    cpu_type = next((cpu for cpu in types if cpu.id == section.cpu_id), None)
    if cpu_type is None:
        near = ", ".join(cpu.id for cpu in types[:5])
        raise NotOfferedError(f"RunPod's catalogue has no such CPU flavor; it has {near} ...")
    return cpu_type.data_centers, cpu_type.usd_per_vcpu * vcpu, cpu_type.ram_gb_per_vcpu * vcpu


def s3_refusal(centre: str | None, endpoint: str | None, volume: str) -> str | None:
    """Return why a run on this volume cannot be followed, or None. `endpoint` is one that the user set."""
    if endpoint is not None:
        return None
    if centre is None:
        return (
            f"the data centre of the volume {volume} is unknown (the API key may not query it): name it, and "
            "only it, in runpod.data_centers"
        )
    if centre not in S3_CENTRES:
        return (
            f"the volume {volume} is in {centre}, which has no S3 API: without it the run cannot be read "
            f"here. Data centres with an S3 API: {', '.join(S3_CENTRES)}"
        )
    return None


def spent_of(events: Sequence[Event], now: float) -> float:
    """Return the USD cost of a run's pods so far, from their billed prices per hour.

    If the end of a pod was noticed late, it cost money until its time limit at most, unless it was rejected
    for outliving that.
    """
    total, since, price, rejected = 0.0, None, 0.0, False
    longest = until = math.inf
    # Sort, because a pod's events arrive here later than events that were written here meanwhile.
    for moment, event in sorted(_by_our_clock(events, now), key=lambda one: one[0]):
        rented = event.usd_per_hour if isinstance(event, Rental) else None
        if isinstance(event, DuplicateEnded):
            total += event.usd or 0.0
        ends = isinstance(event, RejectedEnded | Submitting)
        if not rejected:  # a pod that could not be ended outlives its run
            ends = ends or isinstance(event, Finished)
        if since is not None and (ends or rented is not None):
            total, since = total + (min(moment, until) - since) / 3600 * price, None
        rejected = isinstance(event, Rejected) or (rejected and not ends)
        if isinstance(event, ASKED) and event.seconds is not None:
            longest = event.seconds
        if rented is not None:
            since, price, until = moment, rented, math.inf if rejected else moment + longest
    return total + ((min(now, until) - since) / 3600 * price if since is not None else 0.0)


def _by_our_clock(events: Sequence[Event], now: float) -> Iterator[tuple[float, Event]]:
    """Yield each event with its time by this machine's clock.

    A pod's clock may differ. Its supervisor started after the pod was requested, and the events that it wrote
    happened before the next request and before now.
    """
    limits, until = [], now
    for event in reversed(events):
        limits.append(until)
        if isinstance(event, Submitting):
            until = seconds_of(event.time) or until
    requested, late = -math.inf, 0.0
    for event, until in zip(events, reversed(limits), strict=True):
        moment = seconds_of((event.since if isinstance(event, Rental) else None) or event.time)
        if moment is None:
            continue
        if isinstance(event, Submitting):
            requested, late = moment, 0.0
        elif isinstance(event, SupervisorStarted) and late == 0:
            late = max(requested - moment, 0.0)
        elif isinstance(event, Finished) and event.by is None:
            moment = min(moment + late, until)
        yield moment, event

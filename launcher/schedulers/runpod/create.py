"""Renting: the first offer that is taken, once, at no more than its limit."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from launcher.schedulers.base import SchedulerError, UnclearError
from launcher.schedulers.runpod import graphql
from launcher.schedulers.runpod.answers import Created, Pod, Pods, read
from launcher.schedulers.runpod.errors import ApiError, Fate, HostileAnswerError, LostAnswerError
from launcher.schedulers.runpod.twins import UnendedError, end, ids_named, keep_one
from launcher.schedulers.runpod.volume import VolumeError
from launcher.schedulers.runpod.watch import NOT_LISTED_SECONDS, pace

if TYPE_CHECKING:
    from launcher.schedulers.runpod.api import Client
    from launcher.schedulers.runpod.offers import Offer
    from launcher.spec.cluster import RunPod

LOOKS = 4
"For the price of one that was just made: RunPod can be late to know it."
LONGEST_PAUSE = 8.0
"Seconds between two looks for one that was perhaps made."
TRIES = 2
"Of one offer, where RunPod does not answer."
ROUNDING = 1e-3
"USD per hour by which a price may differ from what the catalogue says."


class NotRentedError(SchedulerError):
    """Nothing is rented. The message says why."""


class BudgetSpentError(NotRentedError):
    """What is left of the budget pays for nothing: waiting does not help."""


@dataclass(frozen=True)
class Rented:
    id: str
    cluster: bool
    "Several pods that begin and end together."
    offer: Offer
    usd_per_hour: float
    "As it is billed."

    @property
    def path(self) -> str:
        return f"/clusters/{self.id}" if self.cluster else f"/pods/{self.id}"


@dataclass
class Doubts:
    """Requests whose answers leave open whether there is a pod; each has made one at most."""

    asked: list[tuple[Offer, ApiError]] = field(default_factory=list)
    told: set[str] = field(default_factory=set)
    "Pods of which an answer did tell."
    found: set[str] = field(default_factory=set)
    "Pods of that name which RunPod has listed since."
    since: float = 0.0
    "By the monotonic clock, when the last of them was given up."

    def add(self, offer: Offer, error: ApiError) -> None:
        self.asked.append((offer, error))
        self.since = time.monotonic()

    @property
    def open(self) -> bool:
        """Another pod may still appear."""
        return len(self.asked) > len(self.found - self.told)

    @property
    def last(self) -> tuple[Offer, ApiError]:
        return self.asked[-1]


@dataclass(frozen=True)
class Order:
    """What is asked for, and how the scheduler answers what only it knows."""

    section: RunPod
    offers: Sequence[Offer]
    name: str
    body: Callable[[Offer], dict[str, Any]]
    "The create request for an offer."
    owner: Callable[[], str | None] = lambda: None
    "Who of several of that name has begun the run."


def rent(client: Client, order: Order) -> Rented:
    """Raises NotRentedError, UnclearError, UnendedError."""
    refused: list[tuple[Offer, ApiError | str]] = []
    doubts = Doubts()
    for offer in order.offers:
        try:
            rented = _create(client, order, offer, doubts)
        except ApiError as error:
            refused.append((offer, error))
            if error.fate is not Fate.SKIP:
                break
            continue
        except NotRentedError as error:
            refused.append((offer, str(error)))
            break
        why = too_dear(rented.usd_per_hour, limit_of(order.section, rented.offer))
        if why is None:
            return rented
        _reject(client, order, rented, why)
        refused.append((rented.offer, f"{why}: ended at once"))
        if _has_begun(order, rented):  # another pod would find the run taken
            refused.append((rented.offer, "it had begun the run, so no other is asked for: try again"))
            break
    if doubts.open:  # a pod may still appear, and must find its run
        raise _unclear(order.name, doubts, _why_none(refused))
    raise NotRentedError(_why_none(refused))


def _has_begun(order: Order, rented: Rented) -> bool:
    try:
        return order.owner() == rented.id
    except VolumeError:
        return True


def limit_of(section: RunPod, offer: Offer) -> float | None:
    """USD per hour. The hours that a budget gives hold for the price that was shown."""
    if section.budget is not None:
        return offer.usd_per_hour
    return section.max_price


def too_dear(usd_per_hour: float, limit: float | None) -> str | None:
    """Why, or None. A price that nobody tells is not below any limit."""
    if limit is None or 0 < usd_per_hour <= limit + ROUNDING:
        return None
    said = f"{usd_per_hour:.3f} USD/h" if usd_per_hour else "a price that nobody tells"
    return f"it was billed at {said}, the limit is {limit:.3f}"


def _reject(client: Client, order: Order, rented: Rented, why: str) -> None:
    """Raises UnendedError."""
    try:
        end(client, rented.path)
    except UnendedError as error:
        price = rented.usd_per_hour or rented.offer.usd_per_hour  # at least
        limit = limit_of(order.section, rented.offer)
        raise UnendedError(f"{why}; {error}", rented.path, price, limit) from None


def _why_none(refused: Sequence[tuple[Offer, ApiError | str]]) -> str:
    lines = [
        f"{offer.need.gpu_id or 'CPU'} ({offer.cloud}, {offer.data_center}): {why}" for offer, why in refused
    ]
    if all(isinstance(why, ApiError) and why.status == 400 for _, why in refused):
        lines.append(
            "every candidate was refused alike: read this as a mistake in the request, or as no room anywhere"
        )
    return "nothing is rented:\n" + "\n".join(lines)


def _create(client: Client, order: Order, offer: Offer, doubts: Doubts) -> Rented:
    """One, or none: never two. `doubts`: about this offer and those before it.

    Raises ApiError, NotRentedError, UnclearError, UnendedError.
    """
    cluster = offer.need.nodes > 1
    for _ in range(TRIES):
        if doubts.open and (there := _doubted(client, order, cluster, doubts)):
            return there
        # The plan on the volume is that of one card, and a pod reads it whenever it begins.
        if doubts.open and (card := doubts.last[0].need.gpu_id) != offer.need.gpu_id:
            raise ApiError(f"not asked for while a pod of {card} may still appear", fate=Fate.SKIP)
        body = order.body(offer) | {"name": order.name}  # makes the run's plan that of this offer
        try:
            made, price = _send(client, order.section, offer, body, cluster)
        except (LostAnswerError, HostileAnswerError) as error:
            doubts.add(offer, error)
            seconds = NOT_LISTED_SECONDS * pace()
            print(f"{error}; looking for {order.name} for {seconds:.0f} s", file=sys.stderr)
            continue
        doubts.told.add(made)
        kept = made
        if doubts.open:  # what was perhaps made before would be a second one
            with suppress(ApiError, VolumeError):  # then the pods settle it among themselves
                listed = ids_named(client, order.name, cluster)
                doubts.found |= set(listed)
                kept = keep_one(client, cluster, [made, *listed], order.owner)
        return _billed(client, order, Rented(kept, cluster, offer, price if kept == made else 0.0))
    if there := _doubted(client, order, cluster, doubts):
        return there
    raise _unclear(order.name, doubts)


def _doubted(client: Client, order: Order, cluster: bool, doubts: Doubts) -> Rented | None:
    """What was made all the same; None once it would be listed if it was.

    Raises NotRentedError, UnclearError, UnendedError.
    """
    until = doubts.since + NOT_LISTED_SECONDS * pace()
    pause = client.pause
    while True:
        try:
            if listed := ids_named(client, order.name, cluster):
                doubts.found |= set(listed)
                kept = keep_one(client, cluster, listed, order.owner)
                return _billed(client, order, Rented(kept, cluster, doubts.last[0], 0.0))
        except (ApiError, VolumeError):
            raise _unclear(order.name, doubts) from None
        left = until - time.monotonic()
        if left <= 0:
            return None
        time.sleep(min(pause, LONGEST_PAUSE * pace(), left))
        pause *= 2


def _unclear(name: str, doubts: Doubts, *more: str) -> UnclearError:
    return UnclearError(
        "\n".join([f"RunPod does not tell whether it has made {name}: {doubts.last[1]}", *more])
    )


def _send(
    client: Client, section: RunPod, offer: Offer, body: Mapping[str, Any], cluster: bool
) -> tuple[str, float]:
    """Id, and USD per hour where the answer tells."""
    if cluster:
        return read(Created, client.post("/clusters", body), "POST /clusters").id, 0.0
    if (mutation := graphql.mutation(section, offer.need.nodes, offer.need.gpus)) is not None:
        return graphql.rent(client, section, mutation, offer, body)
    pod = read(Pod, client.post("/pods", body), "POST /pods")
    return pod.id, pod.cost


def _billed(client: Client, order: Order, rented: Rented) -> Rented:
    """With the price that RunPod really asks; 0 where it does not tell.

    Raises NotRentedError, UnendedError.
    """
    price = rented.usd_per_hour
    for look in range(LOOKS):
        try:
            price = max(price, cost(client, rented.id, rented.cluster))
        except ApiError as error:
            if error.status != 404:  # not listed yet
                why = f"its price could not be read: {error}"
                _reject(client, order, rented, why)
                raise NotRentedError(f"{why}, so it was ended") from None
        if price:
            break
        time.sleep(client.pause * 2**look)
    return replace(rented, usd_per_hour=price)


def cost(client: Client, which: str, cluster: bool) -> float:
    """USD per hour. Raises ApiError."""
    return billed_as(client, which, cluster)[1]


def billed_as(client: Client, which: str, cluster: bool) -> tuple[str, float]:
    """GPU type or `CPU`, and USD per hour. Raises ApiError."""
    if cluster:
        path = f"/clusters/{which}/pods"
        pods = read(Pods, client.get(path), f"GET {path}").pods
    else:
        pods = [read(Pod, client.get(f"/pods/{which}"), f"GET /pods/{which}")]
    gpus = [pod.gpu.id for pod in pods if pod.gpu is not None]
    return gpus[0] if gpus else "CPU", sum(pod.cost for pod in pods)

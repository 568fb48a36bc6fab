"""Renting: the first offer that is taken, once, at no more than its limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from launcher.runs.time import stamp
from launcher.schedulers.base import SchedulerError
from launcher.schedulers.runpod.answers import Answer, Clusters, Id, Money, Pod, Pods, read
from launcher.schedulers.runpod.errors import ApiError, Fate, HostileAnswerError, LostAnswerError

if TYPE_CHECKING:
    from launcher.schedulers.runpod.api import Client
    from launcher.schedulers.runpod.offers import Offer
    from launcher.spec.cluster import RunPod

LOOKS = 4
"For one that was perhaps made: it can be missing from RunPod's list for a moment."
TRIES = 3
"Of one offer, where RunPod does not answer."
ROUNDING = 1e-3
"USD per hour by which a price may differ from what the catalogue says."


class NotRentedError(SchedulerError):
    """Nothing is rented. The message says why."""


class UnclearError(SchedulerError):
    """There may be a pod: nobody answered."""


class UnendedError(SchedulerError):
    """There is one that is not wanted, and it goes on costing money."""

    def __init__(self, message: str, path: str, usd_per_hour: float | None = None):
        super().__init__(message)
        self.path, self.usd_per_hour = path, usd_per_hour


class _Created(Answer):
    id: Id
    costPerHr: Money = 0.0  # noqa: N815


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


@dataclass(frozen=True)
class Doubt:
    """An answer that leaves open whether there is a pod."""

    offer: Offer
    error: ApiError


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
    doubts: list[Doubt] = []
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
        _reject(client, rented, why)
        refused.append((rented.offer, f"{why}: ended at once"))
    if doubts:  # a pod may still appear, and must find its run
        raise _unclear(order.name, doubts[-1].error, _why_none(refused))
    raise NotRentedError(_why_none(refused))


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


def _reject(client: Client, rented: Rented, why: str) -> None:
    """Raises UnendedError."""
    try:
        end(client, rented.path)
    except UnendedError as error:
        raise UnendedError(f"{why}; {error}", rented.path, rented.usd_per_hour or None) from None


def _why_none(refused: Sequence[tuple[Offer, ApiError | str]]) -> str:
    lines = [
        f"{offer.need.gpu_id or 'CPU'} ({offer.cloud}, {offer.data_center}): {why}" for offer, why in refused
    ]
    if all(isinstance(why, ApiError) and why.status == 400 for _, why in refused):
        lines.append(
            "every candidate was refused alike: read this as a mistake in the request, or as no room anywhere"
        )
    return "nothing is rented:\n" + "\n".join(lines)


def _create(client: Client, order: Order, offer: Offer, doubts: list[Doubt]) -> Rented:
    """One, or none: never two. `doubts`: about this offer and those before it.

    Raises ApiError, NotRentedError, UnclearError, UnendedError.
    """
    cluster = offer.need.nodes > 1
    for attempt in range(TRIES):
        if doubts and (there := _doubted(client, order, cluster, doubts)):
            return there
        # Only now: it makes the run's plan that of this offer.
        body = order.body(offer) | {"name": order.name}
        try:
            made, price = _send(client, order.section, offer, body, cluster)
        except (LostAnswerError, HostileAnswerError) as error:
            doubts.append(Doubt(offer, error))
            time.sleep(client.pause * 2**attempt)
            continue
        if doubts:  # what was perhaps made before would be a second one
            made = _keep_one(client, order, cluster, [made, *_named(client, order.name, cluster)])
        return _billed(client, Rented(made, cluster, offer, price))
    if there := _doubted(client, order, cluster, doubts):
        return there
    raise _unclear(order.name, doubts[-1].error)


def _doubted(client: Client, order: Order, cluster: bool, doubts: list[Doubt]) -> Rented | None:
    """What was made all the same. Raises NotRentedError, UnclearError, UnendedError."""
    last = doubts[-1]
    there = _look_for(client, order, cluster, last.error)
    if there is None:
        return None
    doubts.clear()
    return _billed(client, Rented(there, cluster, last.offer, 0.0))


def _unclear(name: str, doubt: ApiError, *more: str) -> UnclearError:
    lines = [f"RunPod does not tell whether it has made {name}: {doubt}", *more]
    hint = "`launcher status` looks for it again, `launcher runpod leaks` lists what is there"
    return UnclearError("\n".join([*lines, hint]))


def _look_for(client: Client, order: Order, cluster: bool, doubt: ApiError) -> str | None:
    """It can be missing from the list for a moment. Raises UnclearError."""
    for look in range(LOOKS):
        try:
            if there := _named(client, order.name, cluster):
                return _keep_one(client, order, cluster, there)
        except ApiError:
            raise _unclear(order.name, doubt) from None
        time.sleep(client.pause * 2**look)
    return None


def _keep_one(client: Client, order: Order, cluster: bool, ids: Sequence[str]) -> str:
    """The one that has begun the run, or the first; the others are ended."""
    owner = order.owner() if len(set(ids)) > 1 else None
    kept = str(owner if owner in ids else ids[0])
    _end_others(client, cluster, set(ids) - {kept})
    return kept


def _end_others(client: Client, cluster: bool, ids: Iterable[str]) -> None:
    for other in ids:
        with suppress(UnendedError):  # it ends itself when it finds its run taken; `leaks` lists it
            end(client, f"/clusters/{other}" if cluster else f"/pods/{other}")


def _send(
    client: Client, section: RunPod, offer: Offer, body: Mapping[str, Any], cluster: bool
) -> tuple[str, float]:
    """Id, and USD per hour where the answer tells."""
    if cluster:
        return read(_Created, client.post("/clusters", body), "POST /clusters").id, 0.0
    if section.bid_per_gpu is None and not section.server_limit:
        pod = read(Pod, client.post("/pods", body), "POST /pods")
        return pod.id, pod.cost
    mutation = "podFindAndDeployOnDemand" if section.bid_per_gpu is None else "podRentInterruptable"
    kind = mutation[0].upper() + mutation[1:] + "Input"
    query = f"mutation rent($input: {kind}) {{ {mutation}(input: $input) {{ id costPerHr }} }}"
    data = client.graphql(query, {"input": _graphql_input(section, offer, body)})
    made = data.get(mutation)
    if made is None:
        raise ApiError("RunPod: GraphQL: no pod, and no reason", 200, Fate.SKIP)
    created = read(_Created, made, f"GraphQL {mutation}")
    return created.id, created.costPerHr


def _graphql_input(section: RunPod, offer: Offer, body: Mapping[str, Any]) -> dict[str, Any]:
    """The same request in GraphQL's words; it alone knows spot pods and an end that RunPod keeps itself."""
    gpu, mounts = body["gpu"], body.get("mounts", {}).get("network", [])
    wanted = {
        "name": body["name"],
        "imageName": body["image"],
        "dockerArgs": body["args"],
        "cloudType": body["cloud"],
        "gpuTypeId": gpu["id"],
        "gpuCount": gpu["count"],
        "allowedCudaVersions": gpu.get("allowedCudaVersions"),
        "containerDiskInGb": body["disk"],
        "volumeInGb": 0,
        "networkVolumeId": mounts[0]["volumeId"] if mounts else None,
        "volumeMountPath": mounts[0]["path"] if mounts else None,
        "dataCenterId": offer.data_center,
        "ports": ",".join(body.get("ports", ())) or None,
        "env": [{"key": key, "value": value} for key, value in body["env"].items()],
        "containerRegistryAuthId": body.get("registry"),
        "bidPerGpu": section.bid_per_gpu,
        "terminateAfter": stamp(time.time() + offer.max_seconds),
    }
    return {key: value for key, value in wanted.items() if value is not None}


def _named(client: Client, name: str, cluster: bool) -> list[str]:
    """Ids of all of this name that live."""
    if cluster:
        clusters = read(Clusters, client.get("/clusters"), "GET /clusters").clusters
        return [one.id for one in clusters if one.name == name]
    pods = read(Pods, client.get("/pods"), "GET /pods").pods
    return [pod.id for pod in pods if pod.name == name and pod.living]


def named(client: Client, name: str, cluster: bool) -> str | None:
    """One that was made and of which the answer was lost. Raises ApiError."""
    there = _named(client, name, cluster)
    _end_others(client, cluster, there[1:])
    return there[0] if there else None


def _billed(client: Client, rented: Rented) -> Rented:
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
                _reject(client, rented, why)
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


def end(client: Client, path: str) -> None:
    """It is gone afterwards. Raises UnendedError."""
    try:
        client.delete(path)
    except ApiError as error:
        raise UnendedError(
            f"{path.strip('/')} could not be ended and goes on costing money: {error}; "
            "`launcher status` tries again, or end it in RunPod's console",
            path,
        ) from None

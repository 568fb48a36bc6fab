"""Rent one pod or cluster: try the offers in order, and keep the first one within the price limit."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from launcher.planning.cost import hours_of
from launcher.planning.plan import Plan
from launcher.rundir.files import read_record, replace_json, try_lock
from launcher.rundir.layout import RunDir
from launcher.rundir.progress import last_step
from launcher.rundir.time import now
from launcher.schedulers.base import SchedulerError, UnclearError
from launcher.schedulers.runpod import pods, request
from launcher.schedulers.runpod.api import Client
from launcher.schedulers.runpod.errors import (
    ApiError,
    Fate,
    HostileAnswerError,
    LostAnswerError,
    UnendedError,
)
from launcher.schedulers.runpod.evidence import submission_in
from launcher.schedulers.runpod.handle import Handle, api_path, claim, pod_name
from launcher.schedulers.runpod.lifecycle import NOT_LISTED_SECONDS, keep_first, too_expensive
from launcher.schedulers.runpod.mirror import Copy
from launcher.schedulers.runpod.offers import CLOUD, Market, Need, Offer, query_market, spent_of
from launcher.schedulers.runpod.profile import RunPod
from launcher.schedulers.runpod.records import end_duplicate, reject
from launcher.schedulers.runpod.settings import pace
from launcher.schedulers.runpod.volume import VolumeError
from launcher.spec.cluster import Cluster
from launcher.spec.events import Refused, Submitting
from launcher.spec.job import Job
from launcher.spec.records import RunRecord
from launcher.supervise.sweep_turn import sweep_folder

PRICE_LOOKS = 4
"Number of times to query a new pod's price, because RunPod may not know it at once."
LONGEST_PAUSE = 8.0
"Maximum seconds between two searches for an unconfirmed pod."
TRIES = 2
"Maximum requests for one offer while RunPod does not answer."


class NotRentedError(SchedulerError):
    """Nothing was rented. The message says why."""


class BudgetSpentError(NotRentedError):
    """The rest of the budget is too small to rent anything, so waiting does not help."""


class BusyError(SchedulerError):
    """Another process is renting for the run."""


@dataclass(frozen=True)
class Rented:
    """A pod, or a cluster of pods, that RunPod has confirmed."""

    id: str
    cluster: bool
    offer: Offer
    usd_per_hour: float
    "Billed price; 0 if unknown."

    @property
    def path(self) -> str:
        return api_path(self.id, self.cluster)


@dataclass(frozen=True)
class Order:
    """What to rent."""

    section: RunPod
    offers: Sequence[Offer]
    name: str
    body: Callable[[Offer], dict[str, Any]]
    "Returns the create request for an offer."
    owner: Callable[[], str | None] = lambda: None
    "Returns the id of the pod that has begun the run. Raises VolumeError."
    end_duplicate: Callable[[Client, str], None] = pods.end
    "Ends a second pod of this submission, by its path in the API. Raises UnendedError."


def rent(client: Client, order: Order) -> Rented:
    """Rent one pod or cluster. Raises NotRentedError, UnclearError, UnendedError."""
    return _Submission(client, order).rent()


class _Submission:
    """One submission. It keeps at most one pod, whatever RunPod answers.

    A pod is unconfirmed if its request got no usable answer. Each such request created at most one pod.
    """

    def __init__(self, client: Client, order: Order) -> None:
        self.client, self.order = client, order
        self.cluster = any(offer.need.nodes > 1 for offer in order.offers)
        self.unanswered: list[tuple[Offer, ApiError]] = []
        self.confirmed: set[str] = set()
        self.listed: set[str] = set()
        "Ids with this name that RunPod has listed since the first unanswered request."
        self.until = 0.0
        "Monotonic time after which the latest unconfirmed pod would be listed."

    @property
    def unconfirmed(self) -> bool:
        """Return whether another pod may still appear."""
        return len(self.unanswered) > len(self.listed - self.confirmed)

    def rent(self) -> Rented:
        refused: list[tuple[Offer, ApiError | str]] = []
        for offer in self.order.offers:
            try:
                rented = self._try(offer)
            except (ApiError, NotRentedError) as error:
                skip = isinstance(error, ApiError) and error.fate is Fate.SKIP
                refused.append((offer, error if isinstance(error, ApiError) else str(error)))
                if skip:
                    continue
                break
            why = too_expensive(rented.usd_per_hour, limit_of(self.order.section, rented.offer))
            if why is None:
                return rented
            self._reject(rented, why)
            refused.append((rented.offer, f"{why}: ended at once"))
            if self._has_begun(rented):  # another pod could not begin the run
                refused.append(
                    (rented.offer, "it had begun the run, so no other pod is requested: try again")
                )
                break
        if self.unconfirmed:  # a pod may still appear, and must find its run
            raise self._unclear(_why_none(refused))
        raise NotRentedError(_why_none(refused))

    def _try(self, offer: Offer) -> Rented:
        """Request one offer. Raises ApiError, NotRentedError, UnclearError, UnendedError."""
        for _ in range(TRIES):
            if self.unconfirmed and (found_pod := self._find()):
                return found_pod
            # The plan on the volume is for one GPU type, and a late pod would read it when it starts.
            if self.unconfirmed and (gpu := self.unanswered[-1][0].need.gpu_id) != offer.need.gpu_id:
                raise ApiError(f"not requested while a pod with {gpu} may still appear", fate=Fate.SKIP)
            body = self.order.body(offer) | {"name": self.order.name}
            try:
                new_id, price = _send(self.client, self.order.section, offer, body)
            except (LostAnswerError, HostileAnswerError) as error:
                self.unanswered.append((offer, error))
                seconds = NOT_LISTED_SECONDS * pace()
                self.until = time.monotonic() + seconds
                print(f"{error}; looking for {self.order.name} for {seconds:.0f} s", file=sys.stderr)
                continue
            self.confirmed.add(new_id)
            kept = new_id
            if self.unconfirmed:  # an earlier request may have created a duplicate
                with suppress(ApiError, VolumeError):  # on errors, the pods settle it among themselves
                    kept = self._keep_one([new_id, *self._list()])
            return self._with_price(Rented(kept, self.cluster, offer, price if kept == new_id else 0.0))
        if found_pod := self._find():
            return found_pod
        raise self._unclear()

    def _find(self) -> Rented | None:
        """Search for an unconfirmed pod until it would be listed. Return it, or None if there is none.

        Raises NotRentedError, UnclearError, UnendedError.
        """
        pause = self.client.pause
        while True:
            try:
                if ids := self._list():
                    kept = self._keep_one(ids)
                    return self._with_price(Rented(kept, self.cluster, self.unanswered[-1][0], 0.0))
            except (ApiError, VolumeError):
                raise self._unclear() from None
            left = self.until - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(pause, LONGEST_PAUSE * pace(), left))
            pause *= 2

    def _list(self) -> list[str]:
        ids = pods.ids_named(self.client, self.order.name, self.cluster)
        self.listed |= set(ids)
        return ids

    def _keep_one(self, ids: Sequence[str]) -> str:
        """End the duplicates and return the id that is kept. Raises VolumeError before ending any."""
        owner = self.order.owner() if len(set(ids)) > 1 else None
        kept, *duplicates = keep_first(ids, owner)
        for duplicate in duplicates:
            with suppress(UnendedError):  # it ends itself when it finds its run taken; `leaks` lists it
                self.order.end_duplicate(self.client, api_path(duplicate, self.cluster))
        return kept

    def _with_price(self, rented: Rented) -> Rented:
        """Return the pod with its billed price. Raises NotRentedError, UnendedError."""
        price = rented.usd_per_hour
        for attempt in range(PRICE_LOOKS):
            try:
                price = max(price, pods.billed(self.client, rented.path, rented.offer.need.nodes)[1])
            except ApiError as error:
                if error.status != 404:  # 404: not listed yet
                    why = f"its price could not be read: {error}"
                    self._reject(rented, why)
                    raise NotRentedError(f"{why}, so it was ended") from None
            if price:
                break
            time.sleep(self.client.pause * 2**attempt)
        return replace(rented, usd_per_hour=price)

    def _reject(self, rented: Rented, why: str) -> None:
        """End a pod that must not be kept. Raises UnendedError."""
        try:
            pods.end(self.client, rented.path)
        except UnendedError as error:
            price = rented.usd_per_hour or rented.offer.usd_per_hour  # if unknown, a lower bound
            limit = limit_of(self.order.section, rented.offer)
            raise UnendedError(f"{why}; {error}", rented.path, price, limit) from None

    def _has_begun(self, rented: Rented) -> bool:
        try:
            return self.order.owner() == rented.id
        except VolumeError:
            return True

    def _unclear(self, *more: str) -> UnclearError:
        error = self.unanswered[-1][1]
        first = f"it is unknown whether RunPod has created {self.order.name}: {error}"
        return UnclearError("\n".join([first, *more]))


def limit_of(section: RunPod, offer: Offer) -> float | None:
    """Return the maximum USD per hour. With a budget, it is the offered price, on which the hours depend."""
    return offer.usd_per_hour if section.budget is not None else section.max_price


def _why_none(refused: Sequence[tuple[Offer, ApiError | str]]) -> str:
    lines = [f"{offer.place}: {why}" for offer, why in refused]
    if all(isinstance(why, ApiError) and why.status == 400 for _, why in refused):
        lines.append(
            "RunPod refused every offer with the same error: the request is wrong, or nothing is in stock"
        )
    return "nothing is rented:\n" + "\n".join(lines)


def _send(client: Client, section: RunPod, offer: Offer, body: Mapping[str, Any]) -> tuple[str, float]:
    """Send the create request and return (id, USD per hour); the price is 0 if unknown. Raises ApiError."""
    if offer.need.nodes > 1:
        return pods.read(pods.Created, client.post("/clusters", body), "POST /clusters").id, 0.0
    if (mutation := request.mutation(section, offer.need.nodes, offer.need.gpus)) is not None:
        return request.rent_by_graphql(client, section, mutation, offer, body)
    pod = pods.read(pods.Pod, client.post("/pods", body), "POST /pods")
    return pod.id, pod.cost


def offers_again(client: Client, run: RunDir) -> tuple[Market, tuple[str, ...]]:
    """Return what can be rented for the rest of a run, and lines that describe it to the user.

    The run's recipe fits every GPU with at least as much memory. Raises SchedulerError.
    """
    about, job, cluster, section = _recorded(run)
    gpu, gpus = cluster.node.gpu, about.gpus_per_node
    ids: list[str | None] = [section.gpu_id if gpus else None]
    if gpus and gpu is not None:
        ids += [name for name, memory in section.other_gpus.items() if memory >= gpu.memory]
    plan = _planned(run)
    steps = None if job.steps is None else max(job.steps - (last_step(run) or 0), 0)
    hours = hours_of(steps, job.batch.global_, plan.samples_per_second) if plan is not None else None
    on_host = request.host_gb(section, job, plan) if plan is not None else None
    needs = [Need(name, gpus, about.nodes, hours, on_host) for name in dict.fromkeys(ids)]
    spent = spent_of(run.read_events(), time.time())
    market = query_market(client, section, needs, section.max_seconds(job), spent)
    if not market.offers or section.budget is None:
        return market, request.offer_lines(market, None) if market.offers else ()
    left = section.budget - spent
    rest = f"{left:.2f} of {section.budget:.2f} USD of the budget are left"
    return market, (*request.offer_lines(market, left), rest)


def _recorded(run: RunDir) -> tuple[RunRecord, Job, Cluster, RunPod]:
    """Return run.json, and the job, cluster and `runpod` section in it."""
    about = run.read_about()
    cluster = about.cluster.validated()
    return about, about.job.validated(), cluster, RunPod.used_by(cluster)


def _planned(run: RunDir) -> Plan | None:
    """Return the plan in plan.json, or None if it is damaged or of another version."""
    try:
        return Plan.model_validate(read_record(run.plan))
    except ValidationError:
        return None


@contextmanager
def renting(run: RunDir) -> Iterator[None]:
    """Hold the lock under which one process at a time rents for a run, or for all runs of a sweep.

    Check the run's state inside the block, because it may have got a pod since. Raises BusyError.
    """
    sweep = run.read_about().sweep
    folder = sweep_folder(run, sweep.id) if sweep is not None else run.path
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".rent.lock", "w", encoding="utf-8") as lock:
        if not try_lock(lock):
            raise BusyError(
                f"another process of launcher is renting a pod for {run.id}: "
                f"`launcher status {run.id}` shows the result"
            )
        yield


def lease(
    client: Client,
    copy: Copy,
    event: str,
    market: Market,
    planned_for: Callable[[Offer], None] = lambda _: None,
    **more: Any,
) -> None:
    """Rent a pod for a run and record it as `event`.

    `planned_for` rewrites the run directory for the offer's GPU type. Raises UnclearError; NotRentedError,
    and the run is unchanged; UnendedError, and the run's records name the pod that must be ended.
    """
    run = copy.run
    (_, job, cluster, section), before = _recorded(run), run.read_state()
    if not market.offers:
        kind = BudgetSpentError if market.budget_spent else NotRentedError
        raise kind("nothing can be rented:\n" + "\n".join(market.left_out))
    number = submission_in(run.read_events()).number + 1
    replace_json(run.state, {"state": "submitted", "time": now()})
    seconds = max(offer.max_seconds for offer in market.offers)
    run.append(Submitting(submission=number, limits=_limits(section, market.offers), seconds=seconds))

    def refused(reason: str) -> None:
        run.append(Refused(reason=reason))
        replace_json(run.state, before.replace(reason=reason).as_json())

    try:
        secrets = request.secret_values(job)
        client.hide(secrets.values())
        copy.push()
    except KeyboardInterrupt:
        refused("interrupted before a pod was requested")
        raise
    except (SchedulerError, OSError) as error:
        refused(str(error))
        raise NotRentedError(str(error)) from None

    def body(offer: Offer) -> dict[str, Any]:
        planned_for(offer)
        return request.for_offer(run.scripts, section, offer, number, secrets, client.now())

    order = Order(
        section,
        market.offers,
        pod_name(run.id, number),
        body,
        owner=lambda: copy.text(claim(number)),
        end_duplicate=lambda client, path: end_duplicate(client, run, path),
    )
    try:
        rented = rent(client, order)
    except UnclearError as error:
        raise UnclearError(
            f"{error}\n{run.id} is kept, and may cost money: `launcher status {run.id}` looks for its pod "
            "again, `launcher runpod leaks` lists everything that is rented"
        ) from None
    except UnendedError as error:
        handle = Handle.at(cluster.name, error.path)
        reject(copy, handle, str(error), error.usd_per_hour, error.limit)
        raise
    except (SchedulerError, OSError) as error:
        refused(str(error))
        raise NotRentedError(str(error)) from None
    handle, offer = Handle.of(cluster.name, rented.id, rented.cluster), rented.offer
    run.event(
        event,
        handle=str(handle),
        command=list(request.command(section, offer.need.nodes, offer.need.gpus)),
        gpu=offer.need.gpu_id,
        cloud=CLOUD,
        data_center=offer.data_center,
        usd_per_hour=rented.usd_per_hour,
        seconds=offer.max_seconds,
        **more,
    )


def _limits(section: RunPod, offers: Sequence[Offer]) -> dict[str, float]:
    """Return the maximum USD per hour by GPU type. A pod that is found late does not name its offer."""
    limits: dict[str, float] = {}
    for offer in offers:
        name, limit = offer.need.gpu_id or "CPU", limit_of(section, offer)
        if limit is not None:
            limits[name] = min(limit, limits.get(name, limit))
    return limits

"""A pod for a run: what its request is made of, and what is written down about it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from launcher.planning.cost import hours_of, max_seconds, no_server_limit
from launcher.render.pod import pod_name
from launcher.rundir.files import read_record, replace_json
from launcher.rundir.layout import RunDir
from launcher.rundir.progress import last_step
from launcher.rundir.time import now
from launcher.schedulers.base import SchedulerError, UnclearError
from launcher.schedulers.runpod.create import BudgetSpentError, NotRentedError, Order, Rented, limit_of, rent
from launcher.schedulers.runpod.offers import Market, Need, Offer, look, spent_of
from launcher.schedulers.runpod.place import Handle, claim, submissions
from launcher.schedulers.runpod.prepared import command, scripts_request, told
from launcher.schedulers.runpod.rejected import keep_rejected
from launcher.schedulers.runpod.twins import UnendedError
from launcher.spec.cluster import Cluster, RunPod
from launcher.spec.job import Job

if TYPE_CHECKING:
    from launcher.schedulers.runpod.api import Client
    from launcher.schedulers.runpod.mirror import Copy


@dataclass(frozen=True)
class Leased:
    """A run as it is written down."""

    run: RunDir
    job: Job
    cluster: Cluster
    about: Mapping[str, Any]

    @property
    def section(self) -> RunPod:
        assert self.cluster.runpod is not None  # it was submitted with one
        return self.cluster.runpod


def leased(run: RunDir) -> Leased:
    about = run.read_about()
    return Leased(run, Job.model_validate(about["job"]), Cluster.model_validate(about["cluster"]), about)


def market_again(client: Client, of: Leased) -> Market:
    """For what is left of a run: its recipe fits on every card that is as large. Raises SchedulerError."""
    section, gpu, gpus = of.section, of.cluster.node.gpu, int(of.about["gpus_per_node"])
    ids: list[str | None] = [section.gpu_id if gpus else None]
    if gpus and gpu is not None:
        ids += [name for name, memory in section.other_gpus.items() if memory >= gpu.memory]
    speed = read_record(of.run.plan).get("samples_per_second")
    left = None if of.job.steps is None else max(of.job.steps - (last_step(of.run) or 0), 0)
    hours = hours_of(left, of.job.batch.global_, speed)
    needs = [Need(name, gpus, int(of.about["nodes"]), hours) for name in dict.fromkeys(ids)]
    spent = spent_of(of.run.read_events(), time.time())
    return look(client, section, needs, max_seconds(of.cluster, of.job), spent)


def told_again(run: RunDir, market: Market) -> tuple[str, ...]:
    """For a person, before anything is rented anew; nothing where nothing will be."""
    budget = leased(run).section.budget
    if not market.offers or budget is None:
        return told(market, None) if market.offers else ()
    left = budget - spent_of(run.read_events(), time.time())
    return (*told(market, left), f"{left:.2f} of {budget:.2f} USD of the budget are left")


def lease(
    client: Client,
    copy: Copy,
    event: str,
    market: Market,
    planned_for: Callable[[Offer], None] = lambda _: None,
    **more: Any,
) -> str:
    """The handle. `planned_for` makes the run directory that of the offer's GPU type.

    Raises NotRentedError; then the run is as it was. Raises UnclearError. Raises UnendedError; then the run
    knows the pod that is to be ended.
    """
    run = copy.run
    of, before = leased(run), run.read_state()
    if not market.offers:
        kind = BudgetSpentError if market.budget_spent else NotRentedError
        raise kind("nothing can be rented:\n" + "\n".join(market.left_out))
    number = submissions(run) + 1
    replace_json(run.state, {"state": "submitted", "time": now()})
    seconds = max(offer.max_seconds for offer in market.offers)
    run.event("submitting", submission=number, limits=limits_of(of.section, market.offers), seconds=seconds)
    try:
        secrets = secret_values(of.job)
        client.hide(secrets.values())
        copy.push()

        def body(offer: Offer) -> dict[str, Any]:
            planned_for(offer)
            return request_for(run, offer, number, secrets)

        order = Order(
            section=of.section,
            offers=market.offers,
            name=pod_name(run.id, number),
            body=body,
            owner=lambda: copy.text(claim(number)),
        )
        rented = rent(client, order)
    except UnclearError as error:
        raise UnclearError(
            f"{error}\n{run.id} is kept, and may cost money: `launcher status {run.id}` looks for its pod "
            "again, `launcher runpod leaks` lists what is rented"
        ) from None
    except UnendedError as error:
        handle = Handle.at(of.cluster.name, error.path)
        keep_rejected(copy, handle, str(error), error.usd_per_hour, error.limit)
        raise
    except (SchedulerError, OSError) as error:
        run.event("refused", reason=str(error))
        replace_json(run.state, {**before, "reason": str(error)})
        raise NotRentedError(str(error)) from None
    return write_down(run, event, rented, **more)


def limits_of(section: RunPod, offers: Sequence[Offer]) -> dict[str, float]:
    """USD per hour by GPU type, for a pod that is found later: it does not tell which offer it was."""
    limits: dict[str, float] = {}
    for offer in offers:
        name, limit = offer.need.gpu_id or "CPU", limit_of(section, offer)
        if limit is not None:
            limits[name] = min(limit, limits.get(name, limit))
    return limits


def write_down(run: RunDir, event: str, rented: Rented, **more: Any) -> str:
    profile = str(run.read_about()["cluster"]["name"])
    handle = str(Handle(profile, f"cluster/{rented.id}" if rented.cluster else rented.id))
    offer = rented.offer
    run.event(
        event,
        handle=handle,
        command=list(command(leased(run).section, offer.need.nodes, offer.need.gpus)),
        gpu=offer.need.gpu_id,
        cloud=offer.cloud,
        data_center=offer.data_center,
        usd_per_hour=rented.usd_per_hour,
        seconds=offer.max_seconds,
        **more,
    )
    return handle


def secret_values(job: Job) -> dict[str, str]:
    """Of those that RunPod does not keep itself. Raises SchedulerError."""
    from launcher.supervise.secrets import SecretError, read_secrets

    try:
        return read_secrets([secret for secret in job.secrets if secret.runpod is None])
    except SecretError as error:
        raise SchedulerError(f"secrets: {error}") from None


def request_for(run: RunDir, offer: Offer, number: int, secrets: Mapping[str, str]) -> dict[str, Any]:
    """The request that was rendered, with what only offer and clock tell. Its secrets are in no file."""
    body: dict[str, Any] = dict(scripts_request(run.scripts))
    deadline = int(time.time()) + offer.max_seconds
    if no_server_limit(leased(run).section, offer.need.nodes) is None:
        deadline -= own_end_before(offer.max_seconds)
    body["env"] = {
        **body["env"],
        "LAUNCHER_SUBMISSION": str(number),
        "LAUNCHER_MAX_SECONDS": str(offer.max_seconds),
        "LAUNCHER_DEADLINE": str(deadline),
        **secrets,
    }
    if offer.data_center is not None:
        body["dataCenterIds"] = [offer.data_center]
    if "compute" in body:
        body["compute"] = {**body["compute"], "gpuTypeId": offer.need.gpu_id}
        return body
    body["cloud"] = offer.cloud
    if offer.need.gpu_id is not None:
        body["gpu"] = {**body["gpu"], "id": offer.need.gpu_id}
    return body


def own_end_before(seconds: int) -> int:
    """Seconds between the end that the start script keeps and RunPod's own, in which the run says how it
    ended: the script waits 180 s between SIGTERM and SIGKILL."""
    return min(180, seconds // 20)


def words(event: Mapping[str, Any]) -> str:
    """What was rented, from the event that tells of it."""
    gpu, price = event.get("gpu") or "CPU", event.get("usd_per_hour")
    parts = [str(gpu), *(str(event[name]) for name in ("cloud", "data_center") if event.get(name))]
    return ", ".join([*parts, f"{price:.3f} USD/h"] if isinstance(price, int | float) else parts)


def rented_events(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [event for event in events if event.get("usd_per_hour") is not None]

"""Renting where RunPod tells half of what it did. The server is real, and ours."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import pytest
from pydantic import ValidationError

from launcher.rundir.time import stamp
from launcher.schedulers.base import SchedulerError, UnclearError
from launcher.schedulers.runpod.api import Client
from launcher.schedulers.runpod.lifecycle import NOT_LISTED_SECONDS
from launcher.schedulers.runpod.offers import Market, Need, Offer, ordered, s3_refusal, spent_of
from launcher.schedulers.runpod.profile import RunPod
from launcher.schedulers.runpod.renting import NotRentedError, Order, rent
from launcher.schedulers.runpod.request import offer_lines
from launcher.schedulers.runpod.settings import pace
from launcher.schedulers.runpod.volume import VolumeError
from tests.lab import as_events
from tests.schedulers.runpod.http_server import Asked, Reply, Served

NEVER = 10**6
"Looks at the list."
BODY = {
    "name": "launcher-r-1", "image": "i", "cloud": "SECURE", "gpu": {"id": "A", "count": 2}, "disk": 50,
    "mounts": {"network": [{"volumeId": "v", "path": "/workspace"}]}, "ports": ["22/tcp", "80/http"],
    "env": {"A": 'quote " }'}, "args": "bash -c 'x'",
}  # fmt: skip


def offer(gpu: str = "A", price: float = 1.0, hours: float | None = None, **more: Any) -> Offer:
    return Offer(Need(gpu, 2, 1, hours), "EU-RO-1", more.get("stock", "HIGH"), price, 3600)


def pod(id: str, cost: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"id": id, "name": "launcher-r-1", "status": "RUNNING", "cost": cost, **more}


class RunPodOfOurs:
    """Pods in a dictionary; `posted` decides what a creation does."""

    def __init__(self, posted: Callable[[RunPodOfOurs, Asked], Reply]) -> None:
        self.pods: dict[str, dict[str, Any]] = {}
        self.deleted: list[str] = []
        self.hidden = 0
        self.stuck = False
        self.server = Served(lambda asked: self.answer(asked, posted))

    def answer(self, asked: Asked, posted: Callable[[RunPodOfOurs, Asked], Reply]) -> Reply:
        if asked.method == "POST":
            return as_graphql(posted(self, asked)) if asked.path == "/graphql" else posted(self, asked)
        name = asked.path.rpartition("/")[2]
        if asked.method == "DELETE":
            self.deleted.append(name)
            if self.stuck:
                return Reply(500)
            return Reply(204 if self.pods.pop(name, None) else 404)
        if name == "pods":
            self.hidden -= 1
            return Reply(200, {"pods": [] if self.hidden >= 0 else list(self.pods.values())})
        return Reply(200, self.pods[name]) if name in self.pods else Reply(404, {})


def as_graphql(reply: Reply) -> Reply:
    """A pod that was made, in GraphQL's words; every other reply as it is."""
    if reply.status != 201:
        return reply
    made = {"id": reply.body["id"], "costPerHr": reply.body["cost"]}
    return Reply(200, {"data": {"podFindAndDeployOnDemand": made}})


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[Client, RunPodOfOurs]]]:
    monkeypatch.setenv("RUNPOD_API_KEY", "k")
    monkeypatch.setenv("LAUNCHER_RUNPOD_PAUSE", "0.005")
    running: list[RunPodOfOurs] = []

    def start(posted: Callable[[RunPodOfOurs, Asked], Reply]) -> tuple[Client, RunPodOfOurs]:
        running.append(RunPodOfOurs(posted))
        url = running[-1].server.url
        monkeypatch.setenv("LAUNCHER_RUNPOD_API", url)
        monkeypatch.setenv("LAUNCHER_RUNPOD_GRAPHQL", f"{url}/graphql")
        return Client(), running[-1]

    yield start
    for one in running:
        one.server.close()


def order(*offers: Offer, owner: Callable[[], str | None] = lambda: None, **section: Any) -> Order:
    def body(one: Offer) -> dict[str, Any]:
        return {**BODY, "gpu": {"id": one.need.gpu_id, "count": 2}}

    made = RunPod(gpu_id="A", volume_id="v", **section)
    return Order(made, offers or (offer(),), "launcher-r-1", body, owner)


def posts(there: RunPodOfOurs) -> list[Asked]:
    return [asked for asked in there.server.asked if asked.method == "POST"]


def gpu_of(asked: Asked) -> str:
    return str(asked.body["variables"]["input"]["gpuTypeId"])


def test_of_two_that_a_lost_answer_made_one_is_kept(serve: Any) -> None:
    """The list hides the first one until a second has been made."""

    def posted(there: RunPodOfOurs, _: Asked) -> Reply:
        number = len(posts(there))
        there.pods[f"p{number}"] = pod(f"p{number}")
        there.hidden = NEVER if number == 1 else 0
        return Reply(drop=True) if number == 1 else Reply(201, there.pods[f"p{number}"])

    client, there = serve(posted)
    assert rent(client, order()).id == "p2" and there.deleted == ["p1"]
    client, there = serve(posted)
    assert rent(client, order(owner=lambda: "p1")).id == "p1", "the one that has begun the run"
    assert there.deleted == ["p2"]


@pytest.mark.parametrize("seconds", [0.15, 60])
def test_no_second_one_is_asked_for_before_the_first_would_be_listed(serve: Any, seconds: float) -> None:
    """A pod can be missing from the list for a minute, which is 0.3 s here."""
    asked: list[float] = []

    def posted(there: RunPodOfOurs, _: Asked) -> Reply:
        asked.append(time.monotonic())
        name = f"p{len(asked)}"
        timer = threading.Timer(seconds, lambda: there.pods.update({name: pod(name)}))
        timer.daemon = True
        timer.start()
        return Reply(drop=True)

    client, _ = serve(posted)
    if seconds < 1:
        assert rent(client, order()).id == "p1" and len(asked) == 1
        return
    with pytest.raises(UnclearError):
        rent(client, order())
    assert len(asked) == 2 and asked[1] - asked[0] >= NOT_LISTED_SECONDS * pace() == 0.3


def test_an_answer_of_wrong_types_is_looked_behind(serve: Any) -> None:
    def posted(there: RunPodOfOurs, _: Asked) -> Reply:
        there.pods["p1"] = pod("p1")
        return Reply(201, {"id": ["p1"], "cost": "free"})

    client, there = serve(posted)
    assert rent(client, order()).id == "p1" and len(posts(there)) == 1


def test_where_nothing_ever_appears_nobody_claims_to_know(serve: Any) -> None:
    client, there = serve(lambda *_: Reply(502, {"detail": "bad gateway"}))
    with pytest.raises(UnclearError, match=r"whether RunPod has created launcher-r-1: .*502: bad gateway"):
        rent(client, order())
    assert len(posts(there)) == 2


def test_where_every_candidate_refuses_after_a_doubt_the_doubt_stays(serve: Any) -> None:
    def posted(there: RunPodOfOurs, _: Asked) -> Reply:
        return Reply(503) if len(posts(there)) == 1 else Reply(400, {"detail": "no room"})

    client, there = serve(posted)
    with pytest.raises(
        UnclearError, match=r"(?s)503.*no room.*B, .*not requested while a pod with A may still"
    ):
        rent(client, order(offer("A"), offer("B"), offer("A", 2.0)))
    assert [gpu_of(asked) for asked in posts(there)] == ["A", "A", "A"]
    client, _ = serve(lambda *_: Reply(400, {"detail": "no room"}))
    with pytest.raises(NotRentedError, match="RunPod refused every offer with the same error"):
        rent(client, order(offer("A"), offer("B")))


def test_before_the_next_offer_is_asked_for_a_doubted_pod_is_looked_for(serve: Any) -> None:
    """The list hides it until its own offer has been refused."""
    bodies: list[str] = []

    def posted(there: RunPodOfOurs, _: Asked) -> Reply:
        if len(posts(there)) == 1:
            there.pods["p1"] = pod("p1")
            there.hidden = NEVER
            return Reply(drop=True)
        if len(posts(there)) == 2:
            there.hidden = 0
            return Reply(400, {"detail": "no room"})
        there.pods["p3"] = pod("p3")
        return Reply(201, there.pods["p3"])

    client, there = serve(posted)
    wanted = order(offer("A"), offer("B", 2.0), max_price=2.0)

    def body(one: Offer) -> dict[str, Any]:
        bodies.append(str(one.need.gpu_id))
        return wanted.body(one)

    rented = rent(client, replace(wanted, body=body))
    assert (rented.id, rented.offer.need.gpu_id) == ("p1", "A") and len(posts(there)) == 2
    assert set(bodies) == {"A"}, "the plan stays the one of its GPU"
    assert list(there.pods) == ["p1"]


@pytest.mark.parametrize("hidden", [False, True])
def test_another_gpu_is_asked_for_once_every_doubtful_pod_is_accounted_for(serve: Any, hidden: bool) -> None:
    """Each of two creations of a pod is lost; of their pods, which are too dear, one may stay hidden."""

    def posted(there: RunPodOfOurs, asked: Asked) -> Reply:
        number, gpu = len(posts(there)), gpu_of(asked)
        if gpu == "B" or not (number == 1 and hidden):
            there.pods[f"p{number}"] = pod(f"p{number}", cost=5.0 if gpu == "A" else 1.0)
        there.hidden = NEVER if number == 1 else 0
        return Reply(drop=True) if gpu == "A" else Reply(201, there.pods[f"p{number}"])

    client, there = serve(posted)
    wanted = order(offer("A"), offer("B", 1.0), max_price=2.0)
    if hidden:
        with pytest.raises(UnclearError, match="not requested while a pod with A may still appear"):
            rent(client, wanted)
        assert there.deleted == ["p2"]
    else:
        assert rent(client, wanted).offer.need.gpu_id == "B"
        assert sorted(there.deleted) == ["p1", "p2"]


def test_after_a_pod_that_is_too_dear_and_had_begun_the_run_no_other_is_asked_for(serve: Any) -> None:
    def posted(there: RunPodOfOurs, _: Asked) -> Reply:
        there.pods["p1"] = pod("p1", cost=5.0)
        return Reply(201, there.pods["p1"])

    client, there = serve(posted)
    with pytest.raises(NotRentedError, match=r"(?s)ended at once.*it had begun the run"):
        rent(client, order(offer("A"), offer("B"), owner=lambda: "p1", max_price=2))
    assert there.deleted == ["p1"] and len(posts(there)) == 1


def test_where_the_claim_of_two_pods_cannot_be_read_both_live_on_and_none_is_forgotten(serve: Any) -> None:
    def posted(there: RunPodOfOurs, _: Asked) -> Reply:
        there.pods |= {"p1": pod("p1"), "p2": pod("p2")}
        return Reply(drop=True)

    def owner() -> str:
        raise VolumeError("the volume is silent")

    client, there = serve(posted)
    with pytest.raises(UnclearError):
        rent(client, order(owner=owner))
    assert not there.deleted


def test_an_unknown_price_is_below_no_limit(serve: Any) -> None:
    def posted(there: RunPodOfOurs, asked: Asked) -> Reply:
        there.pods["p1"] = pod("p1", cost=0.0)
        return Reply(201, there.pods["p1"])

    client, there = serve(posted)
    with pytest.raises(NotRentedError, match="an unknown price"):
        rent(client, order(max_price=2))
    assert there.deleted == ["p1"]


def test_what_cannot_be_ended_is_said_to_cost_money(serve: Any) -> None:
    def posted(there: RunPodOfOurs, _: Asked) -> Reply:
        there.pods["p1"] = pod("p1", cost=5.0)
        return Reply(201, there.pods["p1"])

    client, there = serve(posted)
    there.stuck = True
    with pytest.raises(SchedulerError, match="pods/p1 could not be ended and keeps costing money"):
        rent(client, order(max_price=2))


@pytest.mark.parametrize(
    ("section", "mutation"),
    [
        ({"bid_per_gpu": 0.2}, "podRentInterruptable"),
        ({}, "podFindAndDeployOnDemand"),
    ],
)
def test_graphql_rents_what_rest_cannot_with_an_end_that_runpod_keeps(
    serve: Any, section: dict[str, Any], mutation: str
) -> None:
    def posted(there: RunPodOfOurs, _: Asked) -> Reply:
        there.pods["p1"] = pod("p1", cost=0.4)
        return Reply(200, {"data": {mutation: {"id": "p1", "costPerHr": 0.4}}})

    client, there = serve(posted)
    rented = rent(client, order(**section))
    assert (rented.id, rented.usd_per_hour) == ("p1", 0.4)
    sent = posts(there)[0].body
    wanted = sent["variables"]["input"]
    assert mutation in sent["query"] and "quote" not in sent["query"]
    assert wanted["env"] == [{"key": "A", "value": 'quote " }'}] and wanted["dockerArgs"] == BODY["args"]
    assert (wanted["networkVolumeId"], wanted["ports"], wanted["dataCenterId"]) == (
        "v",
        "22/tcp,80/http",
        "EU-RO-1",
    )
    assert wanted.get("bidPerGpu") == section.get("bid_per_gpu")
    end = datetime.fromisoformat(wanted["terminateAfter"].replace("Z", "+00:00"))
    assert 3500 < (end - datetime.now(timezone.utc)).total_seconds() <= 3600


def test_offers_are_ordered_by_the_whole_job_where_that_is_known() -> None:
    slow, fast = offer("slow", 1.0, hours=10), offer("fast", 3.0, hours=2)
    assert [one.need.gpu_id for one in ordered([slow, fast])] == ["fast", "slow"]
    unknown = offer("unknown", 2.0)
    assert [one.need.gpu_id for one in ordered([slow, fast, unknown])] == ["slow", "unknown", "fast"]
    low, high = offer("low", stock="LOW"), offer("high")
    assert ordered([low, high])[0] is high


def test_what_does_not_end_within_its_limit_is_said_and_hours_are_written_plainly() -> None:
    """The limit is an hour."""
    assert "about 1,280 h, 1280.30 USD predicted; at most 1 h, 1.00 USD" in str(offer(hours=1280.3))
    assert offer(hours=1.0).unfinished(None) is None
    assert offer(hours=2.5).unfinished(None) == "will not finish within 1 h: 2 resumes with `launcher resume`"
    short = "will not finish within the budget: 2.50 USD predicted, 2.00 USD allowed"
    assert offer(hours=2.5).unfinished(2.0) == short
    found = Market((offer(hours=2.5), offer("B", hours=2.5)), (), "EU-RO-1")
    assert offer_lines(found, None)[1].startswith("it will not finish") and offer_lines(found, None)[
        2
    ].startswith("else")


def test_a_budget_limits_the_hours_by_what_earlier_pods_have_cost() -> None:
    section = RunPod(gpu_id="A", budget=10)
    assert section.affordable(2.0, 24 * 3600, 0.0) == 5 * 3600
    assert section.affordable(2.0, 3600, 0.0) == 3600
    assert section.affordable(2.0, 24 * 3600, 11.0) == 0
    events = [
        {"time": "2026-11-21T08:00:00.000000Z", "event": "submitted", "usd_per_hour": 2.0},
        {"time": "2026-11-21T09:30:00.000000Z", "event": "finished"},
        {"time": "2026-11-21T12:00:00.000000Z", "event": "requeued", "usd_per_hour": 4.0},
    ]
    noon = datetime(2026, 11, 21, 12, 15, tzinfo=timezone.utc).timestamp()
    assert spent_of(as_events(events), noon) == pytest.approx(1.5 * 2 + 0.25 * 4)
    events[0]["seconds"] = events[2]["seconds"] = 600  # its end was seen only when somebody looked
    assert spent_of(as_events(events), noon) == pytest.approx((2 + 4) / 6)
    events.append({"time": "2026-11-21T12:01:00.000000Z", "event": "duplicate-ended", "usd": 0.5})
    assert spent_of(as_events(events), noon) == pytest.approx((2 + 4) / 6 + 0.5)


@pytest.mark.parametrize(("ahead", "usd"), [(0, 2.0), (-7200, 1.8), (7200, 4.0)])
def test_a_pod_whose_clock_is_another_costs_money_while_it_may_have_lived(ahead: int, usd: float) -> None:
    """Requested at 8:00 for 2 USD an hour, begun at 8:06, ended at 9:00; another one from 10:00 to 10:30."""
    ten = datetime(2026, 11, 21, 10, 0, tzinfo=timezone.utc).timestamp()

    def at(seconds: float, event: str, **more: object) -> dict[str, object]:
        return {"time": stamp(ten + seconds), "event": event, **more}

    first = [
        at(-7200, "submitting"),
        at(-6840 + ahead, "started"),
        at(-7200, "submitted", usd_per_hour=2.0),
        at(-3600 + ahead, "finished"),
    ]
    second = [at(0, "submitting"), at(0, "resubmitted", usd_per_hour=2.0)]
    assert spent_of(as_events(first), ten) == pytest.approx(usd)
    assert spent_of(as_events([*first, *second]), ten + 1800) == pytest.approx(usd + 1.0), (
        "the second goes on"
    )


def test_a_rejected_pod_costs_until_it_is_ended_whatever_its_run_says() -> None:
    def at(minutes: int, event: str, **more: object) -> dict[str, object]:
        return {
            "time": f"2026-11-21T{8 + minutes // 60:02}:{minutes % 60:02}:00.000000Z",
            "event": event,
            **more,
        }

    events = [
        at(0, "submitting"),
        at(1, "rejected", usd_per_hour=6.0, since="2026-11-21T08:00:00.000000Z"),
        at(5, "finished"),
    ]
    half_past = datetime(2026, 11, 21, 8, 30, tzinfo=timezone.utc).timestamp()
    assert spent_of(as_events(events), half_past) == pytest.approx(3.0)
    ended = [*events, at(20, "rejected-ended"), at(21, "finished")]
    assert spent_of(as_events(ended), half_past) == pytest.approx(2.0)
    again = [*events, at(10, "submitting"), at(11, "resubmitted", usd_per_hour=3.0), at(21, "finished")]
    assert spent_of(as_events(again), half_past) == pytest.approx(1.0 + 0.5)


def test_a_data_centre_without_s3_is_refused_with_those_that_have_it() -> None:
    assert "US-KS-2" in str(s3_refusal("US-TX-3", None, "v"))
    assert s3_refusal("EU-RO-1", None, "v") is None
    assert "runpod.data_centers" in str(s3_refusal(None, None, "v"))
    assert s3_refusal(None, "http://127.0.0.1:1", "v") is None


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({}, "give gpu_id"),
        ({"cpu_id": "cpu3c"}, "belong together"),
        ({"cpu_id": "cpu3c", "vcpu": 6}, "not a power of two"),
        ({"cpu_id": "cpu3c", "vcpu": 4, "bid_per_gpu": 1}, "need gpu_id"),
        ({"gpu_id": "A", "clouds": []}, "clouds"),
        ({"gpu_id": "A", "budget": 0}, "budget"),
    ],
)
def test_a_profile_that_rents_nothing_is_refused(section: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        RunPod.model_validate(section)


@pytest.mark.parametrize("limit", [True, False])
def test_only_graphql_rents_a_pod_without_gpus_that_runpod_ends_itself(serve: Any, limit: bool) -> None:
    def posted(there: RunPodOfOurs, asked: Asked) -> Reply:
        there.pods["p1"] = pod("p1", cost=0.1)
        made = {"deployCpuPod": {"id": "p1", "costPerHr": 0.1}}
        return Reply(200, {"data": made}) if asked.path == "/graphql" else Reply(201, there.pods["p1"])

    client, there = serve(posted)
    cpu = Offer(Need(None, 0, 1, None), "EU-RO-1", "HIGH", 0.1, 3600, ram_gb=4.0)
    made = RunPod(cpu_id="cpu3c", vcpu=2, volume_id="v", server_limit=limit)
    body = {name: value for name, value in BODY.items() if name != "gpu"}
    body["cpu"] = {"id": "cpu3c", "vcpuCount": 2}
    assert rent(client, Order(made, (cpu,), "launcher-r-1", lambda _: body)).id == "p1"
    (asked,) = posts(there)
    assert asked.path == ("/graphql" if limit else "/pods")
    if limit:
        wanted = asked.body["variables"]["input"]
        assert "deployCpuPodInput!" in asked.body["query"] and wanted["instanceId"] == "cpu3c-2-4"
        assert "terminateAfter" in wanted and not {"gpuTypeId", "volumeInGb"} & set(wanted)


@pytest.mark.parametrize(
    "refusal",
    [
        Reply(403, {"error": "no GraphQL for this key"}),
        Reply(
            200,
            {
                "errors": [
                    {
                        "message": "no field terminateAfter",
                        "extensions": {"code": "GRAPHQL_VALIDATION_FAILED"},
                    }
                ]
            },
        ),
    ],
    ids=["key", "field"],
)
def test_a_pod_that_graphql_refuses_is_not_rented_without_its_limit(serve: Any, refusal: Reply) -> None:
    client, there = serve(lambda *_: refusal)
    with pytest.raises(NotRentedError, match="set `server_limit: false` in the profile"):
        rent(client, order())
    assert {asked.path for asked in posts(there)} == {"/graphql"}


def test_a_cluster_of_pods_has_no_limit_of_runpods(serve: Any) -> None:
    def posted(there: RunPodOfOurs, _: Asked) -> Reply:
        return Reply(201, {"id": "c1"})

    client, there = serve(posted)
    there.pods |= {"p1": pod("p1"), "p2": pod("p2")}
    several = Offer(Need("A", 2, 2, None), "EU-RO-1", "HIGH", 2.0, 3600)
    assert rent(client, order(several)).cluster
    assert [asked.path for asked in posts(there)] == ["/clusters"]


def test_a_pod_of_a_cluster_that_is_listed_late_is_in_its_price(serve: Any) -> None:
    client, there = serve(lambda *_: Reply(201, {"id": "c1"}))
    there.pods |= {"p1": pod("p1"), "p2": pod("p2", cost=0.0)}
    several = Offer(Need("A", 2, 3, None), "EU-RO-1", "HIGH", 3.0, 3600)
    assert rent(client, order(several)).usd_per_hour == 3.0
    with pytest.raises(NotRentedError, match=r"billed at 3\.000 USD/h, the limit is 2\.500"):
        rent(client, order(several, max_price=2.5))

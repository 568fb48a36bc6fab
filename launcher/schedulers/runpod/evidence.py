"""What is known about a run and its pods, as one value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from launcher.rundir.time import seconds_of
from launcher.schedulers.base import LIVING
from launcher.schedulers.runpod.handle import Handle, handle_in

_ASKED = ("submitting", "submitted", "resubmitted", "requeued")

Question = Literal["records", "pod", "named", "owner", "price", "last words", "other", "begun"]
"""What can be looked up:

- records: the run directory on the volume; its new files are copied here
- pod: the status of the pod that the records name
- named: living pods with the name of the latest submission, while RunPod has not answered it
- owner: which of them has begun the run, by its claim on the volume
- price: GPU type and price of a pod that was found late
- last words: the records once more, after the pod is gone
- other: another living pod of the run that has it, by its claim on the volume
- begun: whether the run has begun, by the volume
"""


@dataclass(frozen=True)
class Rejected:
    """A pod that must not go on and has not been ended yet."""

    handle: Handle
    reason: str


@dataclass(frozen=True)
class Submission:
    """The latest request for a pod."""

    number: int = 0
    time: str = ""
    "As in the events."
    limits: Mapping[str, float] = field(default_factory=dict)
    "USD per hour by GPU type, `CPU` for a pod without GPUs."


@dataclass(frozen=True)
class Evidence:
    """All that is known about a run and its pods.

    The fields from `pod` on are answers: each is valid once its question is in `answered`.
    """

    run_id: str
    handle: Handle
    "Its latest pod, by the records; one that was just found by its name."
    now: float
    "Seconds since the epoch."
    purpose: Literal["look", "renew", "cancel"] = "look"
    "`renew` may rent another interruptible pod; `cancel`: the request to stop is on the volume."
    pace: float = 1.0
    "Factor of all waiting times: 1 for RunPod, less for a sandbox."
    state: Mapping[str, Any] = field(default_factory=dict)
    "state.json"
    submission: Submission = Submission()
    cluster: bool = False
    "Several nodes: the run is rented as a cluster of pods."
    gpu: str = "CPU"
    "The GPU type that the run is planned for."
    deadline: float | None = None
    "When the time of the latest pod is over; seconds since the epoch."
    seconds: int = 0
    "The time limit of the latest pod."
    asked: float | None = None
    "When a pod was last asked for or rented; seconds since the epoch."
    usd_per_hour: float | None = None
    "Price of the latest pod with a known one."
    rented: str = ""
    "What was rented, in words."
    priced: bool = False
    "The price of `handle` is known."
    rejected: Rejected | None = None
    waiting: bool = False
    "No pod could be rented in the place of an interrupted one, or for the run of a sweep."
    queued: bool = False
    "It waits for its turn in its sweep."
    attended: bool = True
    "The process on this machine lives that rents the pods of the sweep."
    turn: bool = False
    "It is its turn."
    attempts: bool = False
    "An attempt has been started."
    interruptible: bool = False
    "RunPod may take the pod away when somebody pays more."
    renewals_left: bool = False
    "The job and its budget of preemptions allow another interruptible pod."
    may_rent_at: float = 0.0
    "Not to be rented before; seconds since the epoch."

    answered: frozenset[Question] = frozenset()
    ended: frozenset[Handle] = frozenset()
    "Pods that were ended just now."
    error: str | None = None
    "Why the latest question was not answered, or the latest pod not ended."
    trouble: str = ""
    "Why the records could not be read, or not be believed."
    unreadable: bool = False
    "The records could not be read."
    pod: str = ""
    "Status; empty if RunPod does not know the pod."
    named: tuple[str, ...] = ()
    owner: str | None = None
    price: tuple[str, float] | None = None
    "GPU type and USD per hour, of a pod that was found late."
    other: Handle | None = None
    begun: bool = False

    @property
    def living(self) -> bool:
        return self.state.get("state", "submitted") in LIVING

    @property
    def age(self) -> float:
        """Seconds since a pod was last asked for."""
        return float("inf") if self.asked is None else self.now - self.asked


def rejected_in(events: Sequence[Mapping[str, Any]]) -> Rejected | None:
    """The pod that must not go on, until it is ended or another one is asked for."""
    for event in reversed(events):
        if event.get("event") in ("submitting", "rejected-ended"):
            return None
        if event.get("event") == "rejected":
            _, profile, pod = str(event["handle"]).split(":", 2)
            return Rejected(Handle(profile, pod), str(event.get("reason", "")))
    return None


def submission_in(events: Sequence[Mapping[str, Any]]) -> Submission:
    asked = [event for event in events if event.get("event") == "submitting"]
    if not asked:
        return Submission()
    last = asked[-1]
    return Submission(len(asked), str(last.get("time", "")), last.get("limits", {}))


def waits_in(events: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the run waits for another interruptible pod, or for its turn in its sweep."""
    return _last_wait(events) is not None


def queues_in(events: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the run waits for its turn in its sweep."""
    return bool((_last_wait(events) or {}).get("queued"))


def _last_wait(events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    kinds = ("waiting", "submitting", "finished")
    last = next((event for event in reversed(events) if event.get("event") in kinds), None)
    return last if last is not None and last["event"] == "waiting" else None


def limit_in(events: Sequence[Mapping[str, Any]]) -> tuple[float, int] | None:
    """(deadline in seconds since the epoch, time limit in seconds) of the latest pod."""
    for event in reversed(events):
        seconds, since = event.get("seconds"), seconds_of(str(event.get("time", "")))
        if event.get("event") in _ASKED and isinstance(seconds, int) and since is not None:
            return since + seconds, seconds
    return None


def words(event: Mapping[str, Any]) -> str:
    """What was rented, by the event that tells of it."""
    gpu, price = event.get("gpu") or "CPU", event.get("usd_per_hour")
    parts = [str(gpu), *(str(event[name]) for name in ("cloud", "data_center") if event.get(name))]
    return ", ".join([*parts, f"{price:.3f} USD/h"] if isinstance(price, int | float) else parts)


def from_events(
    run_id: str,
    events: Sequence[Mapping[str, Any]],
    about: Mapping[str, Any],
    found: Handle | None = None,
    **more: Any,
) -> Evidence:
    """What a run's events and run.json tell. `found`: a pod that no event names yet. `more`: the other fields
    of the Evidence."""
    cluster: Mapping[str, Any] = about["cluster"]
    handle = handle_in(events, str(cluster.get("name", "")), run_id)
    if handle.id is None and found is not None:
        handle = found
    priced = [event for event in events if event.get("usd_per_hour") is not None]
    asked = [one for one in events if one.get("event") == "submitting" or one.get("usd_per_hour") is not None]
    deadline, seconds = limit_in(events) or (None, 0)
    return Evidence(
        run_id=run_id,
        handle=handle,
        submission=submission_in(events),
        cluster=int(about["nodes"]) > 1,
        gpu=str(cluster["runpod"].get("gpu_id")) if about["gpus_per_node"] else "CPU",
        deadline=deadline,
        seconds=seconds,
        asked=seconds_of(str(asked[-1].get("time", ""))) or 0.0 if asked else None,
        usd_per_hour=next((one["usd_per_hour"] for one in reversed(priced) if one["usd_per_hour"]), None),
        rented=words(priced[-1]) if priced else "",
        priced=any(event.get("handle") == str(handle) for event in priced),
        rejected=rejected_in(events),
        waiting=waits_in(events),
        queued=queues_in(events),
        interruptible=cluster["runpod"].get("bid_per_gpu") is not None,
        **more,
    )

"""`Evidence`: everything that is known about a run and its pods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from launcher.rundir.time import seconds_of
from launcher.schedulers.runpod.handle import Handle, handle_in
from launcher.spec.events import (
    Event,
    Finished,
    Found,
    Refused,
    Rejected,
    RejectedEnded,
    Rental,
    Requeued,
    SecondEnded,
    Submitted,
    Submitting,
    Waiting,
    latest,
)
from launcher.spec.records import RunRecord, StateRecord

ASKED = (Submitting, Submitted, Requeued)
"Events of a request for a pod, with its time limit."

Question = Literal["records", "pod", "named", "owner", "price", "last words", "other", "begun"]
"""What can be looked up:

- records: the run directory on the volume; new files are copied to this machine
- pod: the status of the pod that the records name
- named: live pods with the latest submission's name, while RunPod has not confirmed the submission
- owner: which of those pods has begun the run, according to the claim file on the volume
- price: GPU type and price of a pod that was found late
- last words: the records again, after the pod is gone
- other: another live pod that has claimed the run on the volume
- begun: whether the run has begun, according to the volume
"""


@dataclass(frozen=True)
class RejectedPod:
    """A pod that must end and has not been ended yet."""

    handle: Handle
    reason: str
    late: bool = False
    "Whether its run had ended before."


@dataclass(frozen=True)
class Submission:
    """The latest request for a pod."""

    number: int = 0
    time: str = ""
    "Timestamp as written in the events."
    limits: Mapping[str, float] = field(default_factory=dict)
    "Maximum USD per hour by GPU type; `CPU` stands for a pod without GPUs."


@dataclass(frozen=True)
class Evidence:
    """Everything known about a run and its pods.

    The fields from `pod` on are answers. Each is valid once its question is in `answered`; `price` also if an
    event records it.
    """

    run_id: str
    handle: Handle
    "The run's latest pod according to the records, or a pod that was just found by its name."
    now: float
    "Seconds since the epoch."
    purpose: Literal["look", "renew", "cancel"] = "look"
    "`renew` may rent another interruptible pod; with `cancel`, the stop request is already on the volume."
    pace: float = 1.0
    "Factor of all waiting times: 1 for RunPod, less for a sandbox."
    state: StateRecord = field(default_factory=StateRecord)
    submission: Submission = Submission()
    unconfirmed: bool = False
    "Whether RunPod has not confirmed the latest submission, so that several of its pods may appear."
    cluster: bool = False
    "Whether the run has several nodes and is rented as a cluster of pods."
    gpu: str = "CPU"
    "The GPU type that the run is planned for."
    deadline: float | None = None
    "When the latest pod reaches its time limit, in seconds since the epoch."
    seconds: int = 0
    "Time limit of the latest pod in seconds."
    server_limit: bool = True
    "Whether RunPod itself ends the pod at its time limit. Looked up only after `deadline`."
    asked: float | None = None
    "When a pod was last requested or rented, in seconds since the epoch."
    usd_per_hour: float | None = None
    "Price of the latest pod whose price is known."
    rented: str = ""
    "Description of what was rented."
    priced: bool = False
    "Whether the price of `handle` is known."
    rejected: RejectedPod | None = None
    waiting: bool = False
    "Whether the run waits for a pod: to replace an interrupted one, or for its turn in its sweep."
    queued: bool = False
    "Whether the run waits for its turn in its sweep."
    attended: bool = True
    "Whether the process on this machine that rents the sweep's pods is alive."
    turn: bool = False
    "Whether it is the run's turn."
    attempts: bool = False
    "Whether an attempt has been started."
    interruptible: bool = False
    "Whether RunPod may take the pod away when another user pays more."
    renewals_left: bool = False
    "Whether the job and its preemption budget allow another interruptible pod."
    may_rent_at: float = 0.0
    "Earliest time to rent again, in seconds since the epoch."

    answered: frozenset[Question] = frozenset()
    ended: frozenset[Handle] = frozenset()
    "Pods that were just ended."
    error: str | None = None
    "Why the latest question was not answered, or why the latest pod was not ended."
    trouble: str = ""
    "Why the records could not be read or were invalid."
    unreadable: bool = False
    "Whether the records could not be read."
    pod: str = ""
    "Status of the pod; empty if RunPod does not know it."
    named: tuple[str, ...] = ()
    owner: str | None = None
    price: tuple[str, float] | None = None
    "GPU type and USD per hour of a pod that was found late."
    other: Handle | None = None
    begun: bool = False

    @property
    def living(self) -> bool:
        return not self.state.ended

    @property
    def age(self) -> float:
        """Seconds since a pod was last requested."""
        return float("inf") if self.asked is None else self.now - self.asked


def rejected_in(events: Sequence[Event]) -> RejectedPod | None:
    """Return the rejected pod, or None if it was ended or another one was requested since."""
    rejected: RejectedPod | None = None
    for event in reversed(events):
        if isinstance(event, Submitting | RejectedEnded):
            break
        if isinstance(event, Rejected) and event.handle is not None and rejected is None:
            _, profile, pod = event.handle.split(":", 2)
            rejected = RejectedPod(Handle(profile, pod), event.reason or "")
        elif isinstance(event, Finished) and rejected is not None:
            return replace(rejected, late=True)
    return rejected


def submission_in(events: Sequence[Event]) -> Submission:
    """Return the latest submission in a run's events."""
    submissions = [event for event in events if isinstance(event, Submitting)]
    if not submissions:
        return Submission()
    last = submissions[-1]
    return Submission(len(submissions), last.time, last.limits or {})


def unconfirmed_in(events: Sequence[Event]) -> bool:
    """Return whether no event names a pod that RunPod has confirmed for the latest submission."""
    event = latest(events, *ASKED, Found, SecondEnded)
    return event is None or isinstance(event, Submitting)


def queues_in(events: Sequence[Event]) -> bool:
    """Return whether the run waits for its turn in its sweep."""
    waits = wait_in(events)
    return waits is not None and bool(waits.queued)


def wait_in(events: Sequence[Event]) -> Waiting | None:
    """Return the event since which the run waits for another pod or for its turn; None if it does not."""
    waits: Waiting | None = None
    earlier = waits
    for event in events:
        match event:
            case Waiting():
                waits = event
            case Submitting():
                earlier, waits = waits, None
            case Refused():
                waits = earlier
            case Finished():
                waits = None
    return waits


def limit_in(events: Sequence[Event]) -> tuple[float, int] | None:
    """Return the latest pod's (deadline in seconds since the epoch, time limit in seconds)."""
    for event in reversed(events):
        if isinstance(event, ASKED) and event.seconds and (since := seconds_of(event.time)) is not None:
            return since + event.seconds, event.seconds
    return None


def words(rental: Rental) -> str:
    """Describe what was rented."""
    price = f"{rental.usd_per_hour:.3f} USD/h" if rental.usd_per_hour is not None else None
    return ", ".join(filter(None, (rental.gpu or "CPU", rental.cloud, rental.data_center, price)))


def from_events(
    run_id: str,
    events: Sequence[Event],
    about: RunRecord,
    found: Handle | None = None,
    **fields: Any,
) -> Evidence:
    """Build the Evidence from a run's events and run.json.

    `found` is a pod that no event names yet. `fields` holds the other fields.
    """
    section = about.cluster.runpod
    handle = handle_in(events, about.cluster.name or "", run_id)
    if handle.id is None and found is not None:
        handle = found
    priced = [event for event in events if isinstance(event, Rental) and event.usd_per_hour is not None]
    requested = next(
        (event for event in reversed(events) if isinstance(event, Submitting) or event in priced), None
    )
    deadline, seconds = limit_in(events) or (None, 0)
    return Evidence(
        run_id=run_id,
        handle=handle,
        submission=submission_in(events),
        unconfirmed=unconfirmed_in(events),
        cluster=about.nodes > 1,
        gpu=str(section.gpu_id) if about.gpus_per_node else "CPU",
        deadline=deadline,
        seconds=seconds,
        asked=None if requested is None else seconds_of(requested.time) or 0.0,
        usd_per_hour=next((event.usd_per_hour for event in reversed(priced) if event.usd_per_hour), None),
        rented=words(priced[-1]) if priced else "",
        priced=any(event.handle == str(handle) for event in priced),
        price=next(
            (
                (event.gpu or "CPU", event.usd_per_hour or 0.0)
                for event in priced
                if isinstance(event, Found) and event.handle == str(handle)
            ),
            None,
        ),
        rejected=rejected_in(events),
        waiting=wait_in(events) is not None,
        queued=queues_in(events),
        interruptible=section.bid_per_gpu is not None,
        **fields,
    )

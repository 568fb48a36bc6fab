"""What is done about a run's pods, from evidence alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.rundir.time import stamp
from launcher.schedulers.runpod.evidence import Evidence, RejectedPod, Submission, from_events
from launcher.schedulers.runpod.handle import Handle
from launcher.schedulers.runpod.lifecycle import (
    Action,
    Adopt,
    End,
    EndRejected,
    Follow,
    Look,
    Record,
    Reject,
    Rent,
    Wait,
    decide,
    keep_first,
    may_appear_until,
    past_deadline,
    why_leaked,
)
from launcher.spec.records import ClusterRecord, RunRecord, StateRecord
from tests.lab import as_events

NOW = 1_800_000_000.0
POD, OTHER, UNKNOWN = Handle("box", "p1"), Handle("box", "p2"), Handle("box", None, "r")
ASKED = Submission(1, stamp(NOW - 30), {"A5000": 0.3, "A6000": 0.5})
REJECTED = RejectedPod(POD, "it was billed at 1.000 USD/h, the limit is 0.300; pods/p1 could not be ended")


def at(handle: Handle = POD, *answered: Any, **known: Any) -> Evidence:
    """A run on `handle` that was asked for 30 s ago and has ten minutes."""
    given = {
        "state": StateRecord(state="running"), "submission": ASKED, "gpu": "A5000", "asked": NOW - 30,
        "deadline": NOW + 570, "seconds": 600, "priced": True, "usd_per_hour": 0.27,
    }  # fmt: skip
    return Evidence("r", handle, NOW, answered=frozenset(answered), **{**given, **known})


READ = ("records",)
SEEN = ("records", "pod")
GONE = (*SEEN, "last words", "other")
SPOT = {"interruptible": True, "renewals_left": True, "purpose": "renew"}
PREEMPTED = {"state": StateRecord(state="interrupted", failure="preempted")}
LATE = ("named", "begun")
CANCELLED = {"state": StateRecord(state="cancelled")}
NOT_BEGUN = {"state": StateRecord(state="submitted")}

TABLE: dict[str, tuple[Evidence, Action]] = {
    # a run that goes on
    "a living run: its records are read": (at(), Look("records")),
    "then its pod is asked for": (at(POD, *READ), Look("pod")),
    "a running pod is let alone": (at(POD, *SEEN, pod="RUNNING"), Wait("")),
    "what keeps its records from being read is shown": (
        at(POD, *SEEN, pod="RUNNING", trouble="no answer", unreadable=True),
        Wait("no answer"),
    ),
    "a pod that pulls its image is described": (
        at(POD, *SEEN, pod="STARTING", rented="A5000, 0.270 USD/h", **NOT_BEGUN),
        Wait("pod p1 is STARTING (A5000, 0.270 USD/h)"),
    ),
    "without an answer from RunPod nothing is concluded": (
        at(POD, *READ, error="503"),
        Wait("last known state; 503"),
    ),
    "an ended run is left as it is": (at(state=StateRecord(state="succeeded")), Wait()),
    # a pod that RunPod never confirmed
    "an unconfirmed pod is looked for by its name": (at(UNKNOWN, *READ), Look("named")),
    "it may appear for ten minutes": (
        at(UNKNOWN, *READ, "named"),
        Wait("RunPod did not answer; looking for launcher-r-1"),
    ),
    "after that it was never made": (
        at(UNKNOWN, *READ, "named", asked=NOW - 601),
        Record("lost", "node-failed", "RunPod never answered, and there is no launcher-r-1"),
    ),
    "the only one of its name is followed": (at(UNKNOWN, *READ, "named", named=("p1",)), Follow(POD)),
    "of duplicates the volume tells which one has begun": (
        at(UNKNOWN, *READ, "named", named=("p1", "p2")),
        Look("owner"),
    ),
    "the one that has begun the run is kept": (
        at(UNKNOWN, *READ, "named", "owner", named=("p1", "p2"), owner="p2"),
        Follow(OTHER, (POD,)),
    ),
    "before any has begun the first is kept": (
        at(UNKNOWN, *READ, "named", "owner", named=("p1", "p2"), owner=""),
        Follow(POD, (OTHER,)),
    ),
    "duplicates live on where the volume does not answer": (
        at(UNKNOWN, *READ, "named", named=("p1", "p2"), error="no volume"),
        Wait("last known state; no volume"),
    ),
    # a pod that was found late
    "a pod without a known price is asked for it": (
        at(POD, *SEEN, pod="RUNNING", priced=False),
        Look("price"),
    ),
    "a pod within its limit goes on": (
        at(POD, *SEEN, "price", pod="RUNNING", price=("A5000", 0.3)),
        Wait(""),
    ),
    "a pod above its limit is rejected": (
        at(POD, *SEEN, "price", pod="RUNNING", price=("A5000", 0.4)),
        Reject("it was billed at 0.400 USD/h, the limit is 0.300", 0.4, 0.3),
    ),
    "a pod whose price is unknown is rejected": (
        at(POD, *SEEN, "price", pod="RUNNING", price=("A5000", 0.0)),
        Reject("it was billed at an unknown price, the limit is 0.300", 0.3, 0.3),
    ),
    "a pod with another GPU type is rejected": (
        at(POD, *SEEN, "price", pod="RUNNING", price=("A6000", 0.4)),
        Reject("its pod has A6000, and the run is planned for A5000", 0.4, 0.5),
    ),
    "a resumed run fits every GPU type it may get": (
        at(POD, *SEEN, "price", pod="RUNNING", price=("A6000", 0.4), submission=replace(ASKED, number=2)),
        Wait(""),
    ),
    # a pod past its deadline
    "a pod past its deadline and five minutes is rejected": (
        at(POD, *SEEN, pod="RUNNING", deadline=NOW - 300),
        Reject(
            "it exists more than 10m after its creation (max_hours, or the budget)", 0.27, None
        ),
    ),
    "it has five minutes to end itself": (at(POD, *SEEN, pod="RUNNING", deadline=NOW - 299), Wait("")),
    # a rejected pod
    "the records of a rejected pod are read before it is ended": (at(rejected=REJECTED), Look("records")),
    "a rejected pod is ended whatever its run says": (
        at(POD, *READ, rejected=REJECTED, state=StateRecord(state="cancelled")),
        EndRejected(POD, "it was billed at 1.000 USD/h, the limit is 0.300"),
    ),
    "a rejected pod that cannot be ended is told": (
        at(POD, *READ, rejected=REJECTED, error="pods/p1 keeps costing money"),
        Wait("it was billed at 1.000 USD/h, the limit is 0.300; pods/p1 keeps costing money"),
    ),
    # a pod of a cancelled run that appears later
    "its price is looked up, because it has cost money": (
        at(POD, *LATE, priced=False, named=("p1",), **CANCELLED),
        Look("price"),
    ),
    "a run that was cancelled before does not keep it": (
        at(POD, *LATE, "price", price=("A5000", 0.3), named=("p1",), **CANCELLED),
        Reject("cancelled before it began, but pod p1 appeared later", 0.3, None),
    ),
    "it is looked for until RunPod has ended it": (at(UNKNOWN, deadline=NOW - 1, **CANCELLED), Wait()),
    "it is looked for as long as it takes where RunPod does not end it": (
        at(UNKNOWN, deadline=NOW - 1, server_limit=False, **CANCELLED),
        Look("named"),
    ),
    "further ones are ended, too": (
        at(POD, *LATE, "begun", unconfirmed=True, named=("p2",), **CANCELLED),
        Follow(POD, (OTHER,)),
    ),
    "but once": (
        at(POD, *LATE, "begun", unconfirmed=True, named=("p2",), ended=frozenset({OTHER}), **CANCELLED),
        Wait(),
    ),
    "its run stays cancelled": (
        at(POD, *READ, rejected=replace(REJECTED, late=True), **CANCELLED),
        EndRejected(POD, None),
    ),
    # a pod that is gone
    "a pod can be missing from the list for a minute": (
        at(POD, *SEEN, asked=NOW - 59),
        Wait("RunPod does not list pod p1 yet"),
    ),
    "after that the records may tell how it ended": (at(POD, *SEEN, asked=NOW - 61), Look("last words")),
    "a stopped pod is ended: it costs": (at(POD, *SEEN, "last words", pod="EXITED"), End(POD)),
    "also where its run has ended well": (
        at(POD, *SEEN, "last words", pod="EXITED", state=StateRecord(state="succeeded")),
        End(POD),
    ),
    "another pod may have the run": (at(POD, *SEEN, "last words", asked=NOW - 61), Look("other")),
    "it is adopted": (at(POD, *GONE, asked=NOW - 61, other=OTHER), Adopt(OTHER)),
    "nothing is concluded while the records cannot be read": (
        at(POD, *GONE, asked=NOW - 61, trouble="no volume", unreadable=True),
        Wait("pod p1 is gone; its records cannot be read: no volume"),
    ),
    "a pod that is gone without a word is a lost run": (
        at(POD, *GONE, asked=NOW - 61),
        Record(
            "lost", "node-failed",
            "pod p1 is gone before its run was over: ended by hand, by its limit, or for lack of credit",
        ),
    ),
    "an interruptible pod that is gone was taken away": (
        at(POD, *GONE, asked=NOW - 61, interruptible=True),
        Record("interrupted", "preempted", "pod p1 was taken away"),
    ),
    "a pod that RunPod ended before its script began": (
        at(POD, *GONE, asked=NOW - 700, deadline=NOW - 1, **NOT_BEGUN),
        Record(
            "failed", "time-limit",
            "pod p1 is gone: its time of 10m (max_hours, or the budget) was over before its start "
            "script began; is the image right? `launcher resume r --set image=NAME` uses another one",
        ),
    ),
    # another interruptible pod
    "a preempted run gets another pod": (at(**SPOT, **PREEMPTED), Rent()),
    "a look at a list rents none": (at(**{**SPOT, "purpose": "look"}, **PREEMPTED), Wait()),
    "none is rented when the budget of preemptions is spent": (
        at(**{**SPOT, "renewals_left": False}, **PREEMPTED),
        Wait(),
    ),
    "none in the place of a pod on demand": (at(**{**SPOT, "interruptible": False}, **PREEMPTED), Wait()),
    "a run that waits for a pod tries again": (at(POD, *READ, waiting=True, **SPOT, **NOT_BEGUN), Rent()),
    "but not before its pause is over": (
        at(POD, *READ, waiting=True, may_rent_at=NOW + 1, **SPOT, **NOT_BEGUN),
        Wait(),
    ),
    # a cancellation
    "whether a run has begun is read before its pod is ended": (at(purpose="cancel"), Look("begun")),
    "a run that has begun stops by itself": (at(POD, "begun", purpose="cancel", begun=True), Wait()),
    "the pod of one that has not is ended": (at(POD, "begun", purpose="cancel"), End(POD)),
    "then it is cancelled": (
        at(POD, "begun", purpose="cancel", ended=frozenset({POD})),
        Record("cancelled", "cancelled", "cancelled before it began: its pod was ended"),
    ),
    "a run that waits for a pod has none to end": (
        at(UNKNOWN, purpose="cancel", waiting=True),
        Record("cancelled", "cancelled", "cancelled while it waited for another pod"),
    ),
    "an unconfirmed pod stops by itself": (
        at(UNKNOWN, "begun", purpose="cancel"),
        Record(
            "cancelled", "cancelled",
            "cancelled before it began; RunPod has confirmed no pod for it. A pod that still appears "
            "(until 08:09:30 UTC) stops by itself",
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TABLE)
def test_the_next_action_follows_from_the_evidence(case: str) -> None:
    evidence, action = TABLE[case]
    assert decide(evidence) == action
    assert str(evidence) and str(action), "both can be printed"


def test_every_action_has_a_row() -> None:
    assert {type(action) for _, action in TABLE.values()} == set(Action.__args__)


ANSWERS = ("records", "pod", "named", "owner", "price", "last words", "other", "begun")
STATES = ("submitted", "running", "stopping", "succeeded", "failed", "interrupted", "cancelled", "lost")
ANY: dict[str, st.SearchStrategy[Any]] = {
    "handle": st.sampled_from([POD, UNKNOWN]),
    "purpose": st.sampled_from(["look", "renew", "cancel"]),
    "answered": st.frozensets(st.sampled_from(ANSWERS)),
    "state": st.sampled_from([StateRecord(state=state, failure="preempted") for state in STATES]),
    "pod": st.sampled_from(["", "PROVISIONING", "RUNNING", "EXITED", "ERROR", "TERMINATED"]),
    "named": st.sampled_from([(), ("p1",), ("p1", "p2")]),
    "owner": st.sampled_from([None, "", "p2", "p9"]),
    "price": st.sampled_from([None, ("A5000", 0.2), ("A5000", 9.0)]),
    "other": st.sampled_from([None, POD, OTHER]),
    "error": st.sampled_from([None, "503"]),
    "rejected": st.sampled_from([None, REJECTED]),
    "ended": st.sampled_from([frozenset(), frozenset({POD})]),
    "deadline": st.sampled_from([None, NOW - 1000, NOW + 1000]),
    "asked": st.sampled_from([None, NOW - 1, NOW - 1000]),
    "priced": st.booleans(),
    "waiting": st.booleans(),
    "begun": st.booleans(),
    "interruptible": st.booleans(),
    "renewals_left": st.booleans(),
    "unreadable": st.booleans(),
}


@settings(max_examples=1500, deadline=None, derandomize=True)
@given(known=st.fixed_dictionaries(ANY))
def test_no_evidence_rents_a_second_pod_or_ends_the_one_that_trains(known: dict[str, Any]) -> None:
    evidence = Evidence("r", now=NOW, submission=ASKED, gpu="A5000", seconds=600, **known)
    action = decide(evidence)
    if isinstance(action, Look):
        assert action.question not in evidence.answered, "each question is asked once"
    if isinstance(action, Rent):
        assert evidence.purpose == "renew" and evidence.interruptible
        assert evidence.rejected is None and evidence.error is None
        assert evidence.waiting or not evidence.living
    if isinstance(action, End):
        stopped = evidence.pod in ("EXITED", "ERROR", "TERMINATED") and "pod" in evidence.answered
        not_begun = evidence.purpose == "cancel" and (evidence.waiting or not evidence.begun)
        assert action.handle not in evidence.ended and (stopped or not_begun)
    if isinstance(action, Follow):
        assert {action.handle, *action.duplicates} == {Handle("box", id) for id in evidence.named}
        assert evidence.owner not in evidence.named or action.handle.id == evidence.owner
    if isinstance(action, Record) and evidence.purpose != "cancel":
        alive = evidence.handle.id is not None and "pod" in evidence.answered and evidence.pod == "RUNNING"
        assert evidence.living and evidence.error is None and not alive


def test_the_owner_is_kept_else_the_first() -> None:
    assert keep_first(["b", "a", "b"], "a") == ["a", "b"]
    assert keep_first(["b", "a"], None) == keep_first(["b", "a"], "c") == ["b", "a"]


def ended_before(seconds: float) -> dict[str, Any]:
    return {"state": StateRecord(state="lost", time=stamp(NOW - seconds))}


@pytest.mark.parametrize(
    ("known", "path", "status", "why"),
    [
        ({}, "/pods/p1", "RUNNING", None),
        ({}, "/pods/p1", "EXITED", "it has stopped (EXITED) but still exists"),
        ({}, "/pods/p2", "RUNNING", "its run is in pods/p1"),
        ({"rejected": REJECTED}, "/pods/p1", "RUNNING", REJECTED.reason),
        (ended_before(121), "/pods/p1", "RUNNING", "its run has ended: lost"),
        (ended_before(119), "/pods/p1", "RUNNING", None),
        ({"handle": UNKNOWN}, "/pods/p1", "RUNNING", None),
    ],
)  # fmt: skip
def test_a_pod_is_leaked_if_its_run_does_not_need_it(
    known: dict[str, Any], path: str, status: str, why: str | None
) -> None:
    assert why_leaked(replace(at(), **known), path, status) == why


def test_a_pods_deadline_and_an_unconfirmed_pods_time_are_scaled_by_the_pace() -> None:
    late = at(deadline=NOW - 2)
    assert past_deadline(late) is None and past_deadline(replace(late, pace=0.005)) is not None
    unknown = at(UNKNOWN)
    assert may_appear_until(unknown) == "08:09:30 UTC" and may_appear_until(at()) is None
    assert may_appear_until(replace(unknown, pace=0.01)) is None


ABOUT = RunRecord(
    nodes=1,
    gpus_per_node=1,
    cluster=ClusterRecord(name="box", runpod={"gpu_id": "A5000", "bid_per_gpu": 0.2}),
)


def test_events_tell_of_the_latest_pod() -> None:
    def event(after: float, kind: str, **more: Any) -> dict[str, Any]:
        return {"time": stamp(NOW + after), "event": kind, **more}

    events = [
        event(0, "submitting", submission=1, limits={"A5000": 0.3}, seconds=600),
        event(5, "submitted", handle="runpod:box:p1", gpu="A5000", usd_per_hour=0.27, seconds=300),
    ]
    first = from_events("r", as_events(events), ABOUT, now=NOW)
    assert (first.handle, first.priced, first.rented) == (POD, True, "A5000, 0.270 USD/h")
    assert (first.deadline, first.seconds, first.asked) == (NOW + 305, 300, NOW + 5)
    assert first.interruptible and not first.waiting and first.gpu == "A5000"
    events.append(event(10, "submitting", submission=2, limits={}))
    again = from_events("r", as_events(events), ABOUT, now=NOW)
    assert (again.handle, again.priced, again.submission.number) == (UNKNOWN, False, 2)
    assert from_events("r", as_events(events), ABOUT, found=OTHER, now=NOW).handle == OTHER
    events.append(event(11, "rejected", handle="runpod:box:p2", reason="too dear"))
    assert from_events("r", as_events(events), ABOUT, now=NOW).rejected == RejectedPod(OTHER, "too dear")
    late = [*events[:-1], event(11, "finished", state="cancelled"), events[-1]]
    assert from_events("r", as_events(late), ABOUT, now=NOW).rejected == RejectedPod(
        OTHER, "too dear", late=True
    )
    events.append(event(12, "rejected-ended", handle="runpod:box:p2"))
    events.append(event(13, "waiting", reason="no room"))
    ended = from_events("r", as_events(events), ABOUT, now=NOW)
    assert ended.rejected is None and ended.waiting
    events += [event(14, "submitting", submission=3, limits={}), event(15, "refused", reason="interrupted")]
    assert from_events("r", as_events(events), ABOUT, now=NOW).waiting
    assert not from_events("r", as_events(events[:-1]), ABOUT, now=NOW).waiting


def test_a_pod_that_was_found_is_held_against_the_limit_after_a_kill_too() -> None:
    """The client was killed after it had recorded the price, and before it rejected the pod."""
    events = [
        {"time": stamp(NOW), "event": "submitting", "limits": {"A5000": 0.3}, "seconds": 600},
        {"time": stamp(NOW), "event": "found", "handle": str(POD), "gpu": "A5000", "usd_per_hour": 0.9},
    ]
    found = from_events(
        "r", as_events(events), ABOUT, now=NOW, state=StateRecord(state="submitted"), pod="RUNNING"
    )
    action = decide(replace(found, answered=frozenset({"records", "pod"})))
    assert action == Reject("it was billed at 0.900 USD/h, the limit is 0.300", 0.9, 0.3)

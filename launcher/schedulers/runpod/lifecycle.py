"""The lifecycle of a run's pods: `decide` maps the Evidence about them to the next Action.

Nothing here does I/O or reads a clock. `poller` gathers the Evidence and carries out the Actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.rundir.time import seconds_of, stamp
from launcher.schedulers.runpod.evidence import Evidence, Question, RejectedPod
from launcher.schedulers.runpod.handle import Handle, pod_name
from launcher.spec.quantities import format_duration

NOT_LISTED_SECONDS = 60.0
"A new pod can be missing from RunPod's list for this long."
UNANSWERED_SECONDS = 600.0
"An unconfirmed pod that does not appear within this time was never created."
GRACE_SECONDS = 300.0
"Time for a pod to end itself: 180 s from SIGTERM to SIGKILL; a cluster's first pod also waits for the rest."
ENDING_SECONDS = 120.0
"Time for a pod to end itself after its run; the first pod of a cluster waits 30 s for the others."
ROUNDING = 1e-3
"USD per hour by which a billed price may differ from the catalogue price."
UNATTENDED = "the process on this machine that rents the pods of the sweep has ended"
POD_LIVES = frozenset({"PROVISIONING", "STARTING", "RUNNING"})


@dataclass(frozen=True)
class Look:
    """Look up the answer to a question."""

    question: Question


@dataclass(frozen=True)
class Wait:
    """Do nothing now. If `reason` is not None, it is shown instead of the recorded one."""

    reason: str | None = None


@dataclass(frozen=True)
class Follow:
    """Take a pod that was found by its name as the run's pod, and end its duplicates."""

    handle: Handle
    duplicates: tuple[Handle, ...] = ()


@dataclass(frozen=True)
class Adopt:
    """Record another pod, which runs the run, as the run's pod, with the state that it wrote."""

    handle: Handle


@dataclass(frozen=True)
class Reject:
    """Record the run's pod as rejected, and ask it to stop."""

    reason: str
    usd_per_hour: float | None
    limit: float | None


@dataclass(frozen=True)
class End:
    """End this pod."""

    handle: Handle


@dataclass(frozen=True)
class EndRejected:
    """End a rejected pod. `reason` says why its run has failed; None if the run had ended before."""

    handle: Handle
    reason: str | None


@dataclass(frozen=True)
class Record:
    """Record how the run ended."""

    state: str
    failure: str
    reason: str


@dataclass(frozen=True)
class Rent:
    """Rent a pod: a replacement for an interrupted one, or the pod of a sweep's run whose turn has come."""


Action = Look | Wait | Follow | Adopt | Reject | End | EndRejected | Record | Rent


def decide(e: Evidence) -> Action:
    """Return the next Action for a run. Repeat with new Evidence until the Action is `Wait`."""
    if e.purpose == "cancel":
        return _cancel(e)
    if e.rejected is not None:
        return _rejected(e, e.rejected)
    if e.error is not None:
        return Wait(f"last known state; {e.trouble or e.error}")
    stopped = "pod" in e.answered and e.pod and e.pod not in POD_LIVES
    if stopped and "last words" in e.answered and e.handle not in e.ended:
        return End(e.handle)  # a stopped pod still costs money
    if e.living and "records" not in e.answered:
        return Look("records")
    if e.living and e.queued and not e.attended:
        return Record("lost", "node-failed", UNATTENDED)
    if not e.living or e.waiting:
        return Rent() if _may_renew(e) else _late_pods(e) or Wait()
    if e.handle.id is None:
        return _unanswered(e)
    if "pod" not in e.answered:
        return Look("pod")
    return _pod_lives(e) if e.pod in POD_LIVES else _pod_is_gone(e)


def _cancel(e: Evidence) -> Action:
    """End the pod of a run that has not begun. A run that has begun stops by itself."""
    if not e.living:
        return Wait()
    if not e.waiting:
        if "begun" not in e.answered:
            return Look("begun")
        if e.begun:
            return Wait()
    if e.handle.id is not None and e.handle not in e.ended:
        return End(e.handle)
    return Record("cancelled", "cancelled", _cancelled(e))


def _cancelled(e: Evidence) -> str:
    if e.queued:
        return "cancelled while it waited for its turn in the sweep"
    if e.waiting:
        return "cancelled while it waited for another pod"
    before = _cancelled_before(e)
    if (until := may_appear_until(e)) is not None:
        return (
            f"{before}; RunPod has confirmed no pod for it. A pod that still appears "
            f"(until {until}) stops by itself"
        )
    if e.handle.id is None:
        return f"{before}; it had no pod"
    return f"{before}: its pod was ended"


def _cancelled_before(e: Evidence) -> str:
    return f"cancelled before it {'went on' if e.attempts else 'began'}"


def _late_pods(e: Evidence) -> Action | None:
    """Look for pods of a cancelled run that RunPod had not confirmed, and reject them; None if none are left.

    A pod that has begun the run stops by itself.
    """
    if e.state.state != "cancelled":
        return None
    if e.handle.id in e.named and e.handle not in e.ended:
        if "price" not in e.answered:
            return Look("price")
        usd = e.price[1] if e.price is not None else None
        return Reject(f"{_cancelled_before(e)}, but {e.handle.words} appeared later", usd, None)
    confirmed = e.handle.id is not None and not e.unconfirmed
    if confirmed or e.deadline is None or (e.server_limit and is_past(e, 0.0)):
        return None  # it is confirmed, was never asked for, or RunPod has ended it
    if "named" not in e.answered:
        return Look("named")
    if e.named and "begun" not in e.answered:
        return Look("begun")
    if not e.named or e.begun:
        return None
    if e.handle.id is None:
        return _follow(e)
    pods = (
        Handle.of(e.handle.profile, pod, e.cluster) for pod in e.named
    )  # the first one is rejected already
    others = tuple(pod for pod in pods if pod not in e.ended)
    return Follow(e.handle, others) if others else None


def _rejected(e: Evidence, rejected: RejectedPod) -> Action:
    if "records" not in e.answered:
        return Look("records")
    reason = rejected.reason.split(";")[0]
    if e.error:
        return Wait(f"{reason}; {e.error}")
    failed_by_rejection = e.living or e.state.state == "cancelled"
    return EndRejected(rejected.handle, reason if failed_by_rejection and not rejected.late else None)


def _may_renew(e: Evidence) -> bool:
    preempted = e.state.state == "interrupted" and e.state.failure == "preempted"
    wanted = e.interruptible and (e.waiting if e.living else preempted and e.renewals_left)
    if e.living and e.queued:
        wanted = e.turn
    return e.purpose == "renew" and wanted and e.now >= e.may_rent_at


def _unanswered(e: Evidence) -> Action:
    """Look for the pod by name, because RunPod's answer to the submission was lost."""
    if "named" not in e.answered:
        return Look("named")
    name = pod_name(e.run_id, max(e.submission.number, 1))
    if not e.named:
        if e.age < UNANSWERED_SECONDS * e.pace:
            return Wait(f"RunPod did not answer; looking for {name}")
        return Record("lost", "node-failed", f"RunPod never answered, and there is no {name}")
    if len(e.named) > 1 and "owner" not in e.answered:
        return Look("owner")
    return _follow(e)


def _follow(e: Evidence) -> Follow:
    kept, *others = keep_first(e.named, e.owner)
    profile = e.handle.profile
    return Follow(
        Handle.of(profile, kept, e.cluster), tuple(Handle.of(profile, one, e.cluster) for one in others)
    )


def keep_first(ids: Sequence[str], owner: str | None) -> list[str]:
    """Sort duplicate pods so that the one to keep comes first: the owner of the run, or the first listed."""
    return sorted(dict.fromkeys(ids), key=lambda one: one != owner)


def _pod_lives(e: Evidence) -> Action:
    if not e.priced and "price" not in e.answered:
        return Look("price")
    if e.price is not None:
        gpu, usd = e.price
        limits = e.submission.limits
        limit = limits.get(gpu, min(limits.values(), default=None))
        if (why := other_gpu(e, gpu) or too_expensive(usd, limit)) is not None:
            return Reject(why, usd or limit, limit)
    if (why := past_deadline(e)) is not None:
        return Reject(why, e.usd_per_hour, None)
    if e.trouble or e.state.state in ("running", "stopping"):
        return Wait(e.trouble)
    return Wait(f"{e.handle.words} is {e.pod}{e.rented and f' ({e.rented})'}")


def _pod_is_gone(e: Evidence) -> Action:
    what = e.handle.words
    if not e.pod and e.age < NOT_LISTED_SECONDS * e.pace:
        return Wait(f"RunPod does not list pod {e.handle.id} yet")
    if "last words" not in e.answered:
        return Look("last words")
    if "other" not in e.answered:
        return Look("other")
    if e.other is not None and e.other != e.handle:
        return Adopt(e.other)
    if e.unreadable:  # the records may show how the run ended
        return Wait(f"{what} is gone; its records cannot be read: {e.trouble}")
    if not e.pod and e.state.state == "submitted" and is_past(e, 0.0):
        return Record("failed", "time-limit", _never_began(e))
    if e.interruptible and e.pod in ("", "EXITED"):
        return Record("interrupted", "preempted", f"{what} was taken away")
    if e.pod == "ERROR":
        return Record("failed", "unknown", _not_started(e))
    gone = "has stopped and was ended" if e.pod else "is gone"
    reason = f"{what} {gone} before its run was over: ended by hand, by its limit, or for lack of credit"
    return Record("lost", "node-failed", reason)


def _never_began(e: Evidence) -> str:
    return (
        f"{e.handle.words} is gone: its time of {format_duration(e.seconds)} (max_hours, or the budget) was "
        "over before its start script began; is the image right? "
        f"`launcher resume {e.run_id} --set image=NAME` uses another one"
    )


def _not_started(e: Evidence) -> str:
    return (
        f"RunPod could not start {e.handle.words}, and it was ended: is the image right? Try another one "
        f"with `launcher resume {e.run_id} --set image=NAME`; "
        f"`launcher logs {e.run_id} --supervisor -f` shows the image pull while it runs"
    )


def other_gpu(e: Evidence, gpu: str) -> str | None:
    """Return why a pod with this GPU type may not have the run, or None if it may.

    A resumed run has one plan for every GPU type that it may get. RunPod may leave out the type.
    """
    if e.submission.number > 1 or gpu in ("CPU", e.gpu):
        return None
    return f"its pod has {gpu}, and the run is planned for {e.gpu}"


def too_expensive(usd_per_hour: float, limit: float | None) -> str | None:
    """Return why the price is too high, or None. An unknown price (0) exceeds any limit."""
    if limit is None or 0 < usd_per_hour <= limit + ROUNDING:
        return None
    price = f"{usd_per_hour:.3f} USD/h" if usd_per_hour else "an unknown price"
    return f"it was billed at {price}, the limit is {limit:.3f}"


def is_past(e: Evidence, grace: float) -> bool:
    """Return whether the latest pod is `grace` seconds past its deadline."""
    return e.deadline is not None and e.now >= e.deadline + grace


def past_deadline(e: Evidence) -> str | None:
    """Return why the run's latest pod has outlived its time limit, or None if it has not."""
    if not is_past(e, GRACE_SECONDS * e.pace):
        return None
    return f"it exists more than {format_duration(e.seconds)} after its creation (max_hours, or the budget)"


def may_appear_until(e: Evidence) -> str | None:
    """Return the time (`HH:MM:SS UTC`) until which an unconfirmed pod may appear, or None if none can."""
    end = (seconds_of(e.submission.time) or 0.0) + UNANSWERED_SECONDS * e.pace
    return f"{stamp(end)[11:19]} UTC" if e.handle.id is None and end > e.now else None


def why_leaked(e: Evidence, path: str, status: str) -> str | None:
    """Return why a rented pod of this run is not needed according to the local records, or None if it is."""
    if status in ("EXITED", "ERROR"):
        return f"it has stopped ({status}) but still exists"
    if e.rejected is not None and e.rejected.handle.path == path:
        return e.rejected.reason
    if e.handle.id is not None and e.handle.path != path:
        return f"its run is in {e.handle.path.strip('/')}"
    if (why := past_deadline(e)) is not None:
        return why
    ended = seconds_of(e.state.time)
    if e.living or (ended is not None and e.now < ended + ENDING_SECONDS):
        return None
    return f"its run has ended: {e.state.state}"

"""What a run's own records and RunPod's say together about its state."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from launcher.rundir.files import replace_json
from launcher.rundir.layout import RunDir
from launcher.rundir.time import now, seconds_of
from launcher.schedulers.base import LIVING, SchedulerError, Status
from launcher.schedulers.rundir import status_of
from launcher.schedulers.runpod.errors import ApiError
from launcher.schedulers.runpod.place import Handle, handle_of
from launcher.schedulers.runpod.rejected import end_rejected, rejected

if TYPE_CHECKING:
    from launcher.schedulers.runpod.api import Client
    from launcher.schedulers.runpod.looks import Looks

NOT_LISTED_SECONDS = 60.0
"A pod that was just made can be missing for a moment."
UNANSWERED_SECONDS = 600.0
"After which a pod that nobody confirmed and nobody sees was never made."


@dataclass(frozen=True)
class Seen:
    """A pod or a cluster as RunPod tells of it; `status` is empty for one that it does not know."""

    status: str

    @property
    def living(self) -> bool:
        return self.status in ("PROVISIONING", "STARTING", "RUNNING")


def ask(client: Client, handle: Handle) -> Seen:
    """Raises ApiError."""
    from launcher.schedulers.runpod.answers import Pod, Pods, read

    try:
        if not handle.cluster:
            return Seen(read(Pod, client.get(handle.path), f"GET {handle.path}").status)
        path = f"{handle.path}/pods"
        pods = read(Pods, client.get(path), f"GET {path}").pods
    except ApiError as error:
        if error.status == 404:
            return Seen("")
        raise
    bad = [pod.status for pod in pods if not pod.living]
    return Seen(bad[0] if bad else pods[0].status if pods else "PROVISIONING")


def look_at(run: RunDir, looks: Looks) -> Status:
    """Its records are brought here, and its pod is asked for."""
    trouble, doubt = "", None
    if (unwanted := rejected(run)) is not None:
        with suppress(SchedulerError):
            looks.fetch(run)
        return _end_unwanted(run, *unwanted, looks)
    if _lives(run.read_state()):
        try:
            doubt = looks.fetch(run)
        except SchedulerError as error:
            trouble = str(error)
    state = run.read_state()
    if not _lives(state) or waits(run):
        return _told(run, state)
    from launcher.schedulers.runpod import late
    from launcher.schedulers.runpod.overdue import reject_overdue
    from launcher.schedulers.runpod.owner import adopt, other_than

    try:
        handle = handle_of(run)
        if handle.id is None:
            found = _unanswered(run, state, looks)
            return found if rejected(run) is None else look_at(run, looks)
        pod = looks.pod(run, handle)
        known = not pod.living or late.is_priced(run, handle)
        if not known and not late.accept(looks.copy(run), handle, looks.client):
            return look_at(run, looks)
        if pod.living and reject_overdue(looks.copy(run), handle):
            return look_at(run, looks)
    except SchedulerError as error:
        return _told(run, {**state, "reason": f"as the run itself last said; {trouble or error}"})
    if pod.living:
        return _told(run, {**state, "reason": trouble or doubt or _going_on(run, state, handle, pod)})
    if not pod.status and _age(run) < NOT_LISTED_SECONDS * pace():
        return _told(run, {**state, "reason": f"RunPod does not list pod {handle.id} yet"})
    with suppress(SchedulerError):
        looks.fetch(run)  # its last words
    state = run.read_state()
    if handle_of(run) != handle:  # a twin has the run
        return look_at(run, looks)
    if _lives(state):
        try:
            if owner := other_than(handle, looks.copy(run), looks.client):
                adopt(looks.copy(run), owner)
                return look_at(run, looks)
        except SchedulerError as error:
            return _told(run, {**state, "reason": f"as the run itself last said; {error}"})
    if pod.status:
        looks.end(handle)  # one that has stopped goes on costing
    if not _lives(state):
        return _told(run, state)
    return _told(run, _settle(run, state, handle, pod, trouble))


def _end_unwanted(run: RunDir, handle: Handle, why: str, looks: Looks) -> Status:
    try:
        end_rejected(run, handle, why, looks.end)
    except SchedulerError as error:
        return _told(run, {**run.read_state(), "reason": f"{why.split(';')[0]}; {error}"})
    return _told(run, run.read_state())


def _settle(run: RunDir, state: Mapping[str, Any], handle: Handle, pod: Seen, trouble: str) -> dict[str, Any]:
    """RunPod has the last word: nobody needs to ask again."""
    from launcher.schedulers.runpod.overdue import time_over

    spot = run.read_about()["cluster"]["runpod"].get("bid_per_gpu") is not None
    what = f"{'cluster' if handle.cluster else 'pod'} {handle.id}"
    if trouble:  # its own records could not be read: it may have said how it ended
        return {**state, "reason": f"{what} is gone; its records cannot be read: {trouble}"}
    kept: dict[str, Any] = {name: state[name] for name in ("attempt",) if name in state}
    if not pod.status and state.get("state", "submitted") == "submitted" and (limit := time_over(run)):
        reason = (
            f"{what} is gone: its time of {limit} (max_hours, or the budget) was over before its start "
            f"script began; is the image right? `launcher resume {run.id} --set image=NAME` gives another one"
        )
        kept |= {"state": "failed", "failure": "time-limit", "reason": reason}
    elif spot and pod.status in ("", "EXITED"):
        kept |= {"state": "interrupted", "failure": "preempted", "reason": f"{what} was taken away"}
    elif pod.status == "ERROR":
        reason = (
            f"RunPod could not start {what}, and it was ended: is the image right? First give another one, "
            f"with `launcher resume {run.id} --set image=NAME`; `launcher logs {run.id} --supervisor -f` "
            "shows the pull while it goes on"
        )
        kept |= {"state": "failed", "failure": "unknown", "reason": reason}
    else:
        gone = "has stopped and was ended" if pod.status else "is gone"
        reason = f"{what} {gone} before its run was over: ended by hand, by its limit, or for want of credit"
        kept |= {"state": "lost", "failure": "node-failed", "reason": reason}
    run.event("finished", **kept, by="runpod")
    replace_json(run.state, {**kept, "time": now()})
    return kept


def _unanswered(run: RunDir, state: Mapping[str, Any], looks: Looks) -> Status:
    """The answer to its creation was lost: it is looked for by its name. Raises SchedulerError."""
    from launcher.schedulers.runpod import late

    name, copy = late.name_of(run), looks.copy(run)
    handle = late.find(copy, looks.client)
    if handle is not None:
        late.accept(copy, handle, looks.client)
        return _told(run, {**state, "reason": f"found by its name: {name}"})
    if _age(run) < UNANSWERED_SECONDS * pace():
        return _told(run, {**state, "reason": f"RunPod did not answer; {name} is looked for"})
    reason = f"RunPod never answered, and there is no {name}"
    lost = {"state": "lost", "failure": "node-failed", "reason": reason}
    run.event("finished", **lost, by="runpod")
    replace_json(run.state, {**lost, "time": now()})
    return _told(run, lost)


def _going_on(run: RunDir, state: Mapping[str, Any], handle: Handle, pod: Seen) -> str:
    from launcher.schedulers.runpod.lease import rented_events, words

    if state.get("state") in ("running", "stopping"):
        return ""
    rented = rented_events(run.read_events())
    about = f" ({words(rented[-1])})" if rented else ""
    return f"{'cluster' if handle.cluster else 'pod'} {handle.id} is {pod.status}{about}"


def _told(run: RunDir, state: Mapping[str, Any]) -> Status:
    return status_of(run, str(handle_of(run)), state)


def _lives(state: Mapping[str, Any]) -> bool:
    return state.get("state", "submitted") in LIVING


def waits(run: RunDir) -> bool:
    """No pod was to be had in the place of one that was taken away."""
    for event in reversed(run.read_events()):
        if event.get("event") in ("waiting", "submitting", "finished"):
            return bool(event["event"] == "waiting")
    return False


def _age(run: RunDir) -> float:
    """Seconds since a pod was last asked for."""
    for event in reversed(run.read_events()):
        if event.get("event") == "submitting" or event.get("usd_per_hour") is not None:
            return time.time() - (seconds_of(str(event.get("time", ""))) or 0.0)
    return float("inf")


def pace() -> float:
    """What pauses are multiplied with: a sandbox is looked at more often than RunPod."""
    from launcher.schedulers.runpod.api import pause_seconds

    return min(1.0, pause_seconds())

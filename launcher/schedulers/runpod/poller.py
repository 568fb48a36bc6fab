"""Looks at a run and its pods, and does what `lifecycle.decide` says."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from launcher.rundir.files import replace_json, replace_text
from launcher.rundir.layout import RunDir
from launcher.rundir.time import now
from launcher.schedulers.base import LIVING, SchedulerError, Status
from launcher.schedulers.over_ssh.exchange import Wanted
from launcher.schedulers.rundir import status_of
from launcher.schedulers.runpod import lifecycle as life
from launcher.schedulers.runpod.errors import ApiError, UnendedError
from launcher.schedulers.runpod.evidence import Evidence, Question, from_events, queues_in, submission_in
from launcher.schedulers.runpod.handle import Handle, claim, handle_of, pod_name
from launcher.schedulers.runpod.queue import has_turn, is_attended
from launcher.schedulers.runpod.settings import pace
from launcher.spec.events import Finished, Found, Rejected, RejectedEnded, Twin, Waiting

if TYPE_CHECKING:
    from launcher.schedulers.runpod.api import Client
    from launcher.schedulers.runpod.mirror import Copy

POD_SECONDS = 10.0
"Between two questions about one pod: RunPod answers about sixty in a minute."
RENT_SECONDS = 30.0
"Between two tries to rent another pod in the place of one that was taken away."
MOST_STEPS = 30
"Actions of one look. A run takes about ten at most."


@dataclass
class _Answers:
    """What one look has found out."""

    given: dict[Question, dict[str, Any]] = field(default_factory=dict)
    of: Handle | None = None
    "The pod that the answers `pod` and `price` are about."
    found: Handle | None = None
    error: str | None = None
    ended: set[Handle] = field(default_factory=set)

    def about(self, handle: Handle) -> None:
        if self.of != handle:
            self.of = handle
            self.given.pop("pod", None)
            self.given.pop("price", None)


class Poller:
    """Looks at runs. `client` and `copy` raise SchedulerError if there is no key, or no volume."""

    def __init__(self, client: Callable[[], Client], copy: Callable[[RunDir], Copy]) -> None:
        self._client, self.copy = client, copy
        self.wanted = Wanted()
        "Which files of a run directory are brought here."
        self.renewed: set[Path] = set()
        "Runs for which this process has rented another interruptible pod."
        self._tried: dict[Path, float] = {}
        self._pods: dict[tuple[Path, Handle], tuple[float, str]] = {}

    @property
    def client(self) -> Client:
        return self._client()

    def status(self, run: RunDir, purpose: Literal["look", "renew", "cancel"] = "look") -> Status:
        """Look at a run and do what is due.

        `renew` may rent another interruptible pod. `cancel` ends the pod of a run that has not begun; it
        raises SchedulerError if the volume or RunPod does not answer.
        """
        answers = _Answers()
        for _ in range(MOST_STEPS):
            evidence = self._evidence(run, answers, purpose)
            action = life.decide(evidence)
            if isinstance(action, life.Wait):
                told = {} if action.reason is None else {"reason": action.reason}
                return status_of(run, str(handle_of(run)), {**evidence.state, **told})
            if isinstance(action, life.Rent):
                self._renew(run)
                answers, purpose = _Answers(), "look"
                continue
            try:
                self._do(run, action, evidence, answers)
            except SchedulerError as error:
                if purpose == "cancel":
                    raise
                answers.error = str(error)
        raise AssertionError(f"{run.id}: no end after {action} by {evidence}")

    def fetch(self, run: RunDir) -> str | None:
        """Bring what the run has written. Returns why its state was not taken. Raises SchedulerError."""
        return self.copy(run).fetch(self.wanted)

    def end(self, handle: Handle) -> None:
        """End the pod, if it is known. Raises SchedulerError."""
        from launcher.schedulers.runpod.pods import end

        if handle.id is not None:
            end(self.client, handle.path)

    def other(self, run: RunDir, handle: Handle) -> Handle | None:
        """Another living pod that has the run. Raises ApiError, VolumeError."""
        from launcher.schedulers.runpod.pods import ids_of_run

        for number, id in ids_of_run(self.client, run.id, handle.cluster):
            if id != handle.id and has_run(self.copy(run), number, id):
                return Handle.of(handle.profile, id, handle.cluster)
        return None

    def _evidence(self, run: RunDir, answers: _Answers, purpose: Any) -> Evidence:
        evidence = evidence_of(run, found=answers.found)
        answers.about(evidence.handle)
        more = {name: value for fields in answers.given.values() for name, value in fields.items()}
        seconds = time.monotonic() - self._tried.get(run.path, float("-inf"))
        return dataclasses.replace(
            evidence,
            purpose=purpose,
            renewals_left=purpose == "renew" and evidence.interruptible and _renewals_left(run),
            attended=not evidence.queued or is_attended(run),
            turn=purpose == "renew" and evidence.queued and has_turn(run),
            may_rent_at=evidence.now + RENT_SECONDS * evidence.pace - seconds,
            answered=frozenset(answers.given),
            ended=frozenset(answers.ended),
            error=answers.error,
            **more,
        )

    def _do(self, run: RunDir, action: life.Action, e: Evidence, answers: _Answers) -> None:
        """Raises SchedulerError."""
        match action:
            case life.Look(question):
                answers.given[question] = self._answer(run, question, e)
            case life.Follow(handle, duplicates):
                answers.found = handle
                for one in duplicates:
                    with suppress(UnendedError):  # it ends itself when its run is taken; `leaks` lists it
                        self.end(one)
            case life.Adopt(handle):
                adopt(self.copy(run), handle)
            case life.Reject(reason, usd_per_hour, limit):
                reject(self.copy(run), e.handle, reason, usd_per_hour, limit)
            case life.End(handle):
                self.end(handle)
                answers.ended.add(handle)
            case life.EndRejected(handle, reason):
                self.end(handle)
                run.append(RejectedEnded(handle=str(handle)))
                if e.living or e.state.get("state") == "cancelled":  # by us, on its pod
                    record(run, "failed", "unknown", f"{reason}: its pod was ended")
            case life.Record(state, failure, reason):
                record(run, state, failure, reason)

    def _answer(self, run: RunDir, question: Question, e: Evidence) -> dict[str, Any]:
        """Fields of the Evidence. Raises SchedulerError."""
        from launcher.schedulers.runpod import pods

        match question:
            case "records" | "last words":
                try:
                    return {"trouble": self.fetch(run) or "", "unreadable": False}
                except SchedulerError as error:
                    return {"trouble": str(error), "unreadable": True}
            case "pod":
                return {"pod": self._pod_status(run, e)}
            case "named":
                name = pod_name(run.id, max(e.submission.number, 1))
                return {"named": tuple(pods.ids_named(self.client, name, e.cluster))}
            case "owner":
                return {"owner": self.copy(run).text(claim(max(e.submission.number, 1)))}
            case "price":
                gpu, price = pods.billed(self.client, e.handle.path)
                # It costs since it was asked for.
                since = e.submission.time
                run.append(Found(handle=str(e.handle), gpu=gpu, usd_per_hour=price, since=since))
                return {"price": (gpu, price)}
            case "other":
                return {"other": self.other(run, e.handle)}
            case "begun":
                begun = self.copy(run).has_begun()
                if begun:
                    self.copy(run).fetch(Wanted())
                return {"begun": begun}

    def _pod_status(self, run: RunDir, e: Evidence) -> str:
        """Raises ApiError."""
        from launcher.schedulers.runpod.pods import status

        at, seen = self._pods.get((run.path, e.handle), (float("-inf"), ""))
        if seen not in life.POD_LIVES or time.monotonic() > at + POD_SECONDS * e.pace:
            seen = status(self.client, e.handle.path)
            self._pods[run.path, e.handle] = (time.monotonic(), seen)
        return seen

    def _renew(self, run: RunDir) -> None:
        """Rent another pod, unless another process is at it or was faster."""
        from launcher.schedulers.runpod.renting import BusyError, NotRentedError, lease, offers_again, renting

        queued = False
        try:
            with renting(run):
                self.status(run)
                read = _Answers({"records": {}})
                if life.decide(self._evidence(run, read, "renew")) != life.Rent():
                    return
                self._tried[run.path] = time.monotonic()
                self.end(handle_of(run))
                market, _ = offers_again(self.client, run)
                queued = queues_in(run.read_events())
                if not queued:
                    lease(self.client, self.copy(run), "requeued", market, reason="preempted")
                elif submission_in(run.read_events()).number:
                    lease(self.client, self.copy(run), "resubmitted", market)
                else:
                    lease(self.client, self.copy(run), "submitted", market)
                self.renewed.add(run.path)
        except (BusyError, UnendedError):
            pass  # another process rents; the next look tells of the pod
        except (NotRentedError, ApiError) as error:
            wait_for_pod(run, error, queued)


def evidence_of(run: RunDir, **more: Any) -> Evidence:
    """What the records that are here tell."""
    return from_events(
        run.id,
        run.read_events(),
        run.read_about(),
        state=run.read_state(),
        attempts=bool(run.attempts()),
        now=time.time(),
        pace=pace(),
        **more,
    )


def has_run(copy: Copy, number: int, id: str) -> bool:
    """Whether this pod or cluster of the submission `number` has begun the run and has not done with it.
    Raises VolumeError."""
    if copy.text(claim(number)) != id or copy.text(f"pod-{id}.done"):
        return False
    state = _state_there(copy)
    return state is None or state["state"] in LIVING


def adopt(copy: Copy, handle: Handle) -> None:
    """Record that this pod has the run, whatever was recorded of another one. Raises VolumeError."""
    copy.run.append(Twin(handle=str(handle)))
    if (state := _state_there(copy)) is not None:
        replace_json(copy.run.state, state)


def _state_there(copy: Copy) -> dict[str, Any] | None:
    """state.json on the volume; None where it is not whole yet, or not the state of a run."""
    with suppress(ValueError):
        state = json.loads(copy.text("state.json"))
        if isinstance(state, dict) and isinstance(state.get("state"), str):
            return state
    return None


def record(run: RunDir, state: str, failure: str, reason: str) -> None:
    """Record how the run ended."""
    kept = {name: value for name, value in run.read_state().items() if name == "attempt"}
    kept |= {"state": state, "failure": failure, "reason": reason}
    run.append(Finished(**kept, by="runpod"))
    replace_json(run.state, {**kept, "time": now()})


def reject(copy: Copy, handle: Handle, reason: str, usd_per_hour: float | None, limit: float | None) -> None:
    """Record a pod that must not go on and could not be ended yet, and ask it to stop."""
    asked = next(event for event in reversed(copy.run.read_events()) if event.get("event") == "submitting")
    told = {"usd_per_hour": usd_per_hour, "limit": limit, "since": asked["time"]}  # it costs from then on
    copy.run.append(Rejected(handle=str(handle), reason=reason, **told))
    replace_json(copy.run.state, {**copy.run.read_state(), "reason": reason, "time": now()})
    with suppress(SchedulerError):
        ask_to_stop(copy)


def ask_to_stop(copy: Copy) -> None:
    """Ask whichever pod has the run, or will. Raises VolumeError; then the next look sends it."""
    replace_text(copy.run.cancel, f"{time.time()}\n")
    copy.send()


def wait_for_pod(run: RunDir, why: SchedulerError, queued: bool) -> None:
    """Record that no pod could be rented. With a budget that is spent none will be.

    `queued`: whether the run waited for its turn in its sweep, in which it keeps its place.
    """
    from launcher.schedulers.runpod.renting import BudgetSpentError

    if isinstance(why, BudgetSpentError):
        record(run, "interrupted", "preempted", str(why))
        return
    run.append(Waiting(reason=str(why), queued=queued or None))
    then = "it is tried again" if queued else f"`launcher logs {run.id} -f` goes on trying"
    reason = f"waits for a pod: {why}; {then}"
    replace_json(run.state, {"state": "submitted", "reason": reason, "time": now()})


def _renewals_left(run: RunDir) -> bool:
    """Whether the job and its budget of preemptions allow another pod."""
    from launcher.spec.job import Job
    from launcher.supervise.policy import spent_budgets

    job = Job.model_validate(run.read_about()["job"])
    return job.requeue and spent_budgets(run.read_events()).get("preemptions", 0) <= job.retries.preemptions

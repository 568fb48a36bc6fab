"""Poll a run and its pods, and carry out what `lifecycle.decide` returns."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from launcher.rundir.files import replace_json
from launcher.rundir.layout import RunDir
from launcher.rundir.time import now
from launcher.schedulers.base import SchedulerError, Status
from launcher.schedulers.rundir import status_of
from launcher.schedulers.runpod import lifecycle as life
from launcher.schedulers.runpod import pods
from launcher.schedulers.runpod.errors import ApiError, UnendedError
from launcher.schedulers.runpod.evidence import Evidence, Question, from_events, queues_in, submission_in
from launcher.schedulers.runpod.handle import Handle, claim, handle_of, pod_name
from launcher.schedulers.runpod.queue import has_turn, is_attended
from launcher.schedulers.runpod.records import adopt, end_duplicate, has_run, record, reject
from launcher.schedulers.runpod.settings import pace
from launcher.schedulers.wanted_files import Wanted
from launcher.spec.events import Found, RejectedEnded, Waiting

if TYPE_CHECKING:
    from launcher.schedulers.runpod.api import Client
    from launcher.schedulers.runpod.mirror import Copy

POD_SECONDS = 10.0
"Pause between two queries about one pod. RunPod answers about 60 queries per minute."
RENT_SECONDS = 30.0
"Pause between two attempts to replace a pod that was taken away."
MOST_STEPS = 30
"Maximum actions per poll. A run takes about ten at most."


@dataclass
class _Answers:
    """The answers found during one poll."""

    given: dict[Question, dict[str, Any]] = field(default_factory=dict)
    handle: Handle | None = None
    "The pod to which the answers `pod` and `price` belong."
    found: Handle | None = None
    "A pod that was found by its name and that no event names yet."
    error: str | None = None
    ended: set[Handle] = field(default_factory=set)

    def switch_to(self, handle: Handle) -> None:
        """Drop the answers about another pod."""
        if self.handle != handle:
            self.handle = handle
            self.given.pop("pod", None)
            self.given.pop("price", None)


class Poller:
    """Polls runs. `client` and `copy` raise SchedulerError if there is no key or no volume."""

    def __init__(self, client: Callable[[], Client], copy: Callable[[RunDir], Copy]) -> None:
        self._client, self.copy = client, copy
        self.wanted = Wanted()
        "Files of a run directory to fetch."
        self.renewed: set[Path] = set()
        "Runs for which this process has rented another interruptible pod."
        self._tried: dict[Path, float] = {}
        self._pods: dict[tuple[Path, Handle], tuple[float, str]] = {}

    @property
    def client(self) -> Client:
        return self._client()

    def status(self, run: RunDir, purpose: Literal["look", "renew", "cancel"] = "look") -> Status:
        """Poll a run, do what is due and return its status.

        With `renew`, this may rent another interruptible pod. With `cancel`, it ends the pod of a run that
        has not begun, and raises SchedulerError if the volume or RunPod does not answer.
        """
        answers = _Answers()
        for _ in range(MOST_STEPS):
            evidence = self._evidence(run, answers, purpose)
            action = life.decide(evidence)
            if isinstance(action, life.Wait):
                changed = {} if action.reason is None else {"reason": action.reason}
                return status_of(run, str(handle_of(run)), evidence.state.replace(**changed))
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
        """Fetch the run's files. Return why its state was invalid, or None. Raises SchedulerError."""
        return self.copy(run).fetch(self.wanted)

    def end(self, handle: Handle) -> None:
        """End the pod if it is known. Raises SchedulerError."""
        if handle.id is not None:
            pods.end(self.client, handle.path)

    def other(self, run: RunDir, handle: Handle) -> Handle | None:
        """Return another live pod that runs the run, or None. Raises ApiError, VolumeError."""
        for number, id in pods.ids_of_run(self.client, run.id, handle.cluster):
            if id != handle.id and has_run(self.copy(run), number, id):
                return Handle.of(handle.profile, id, handle.cluster)
        return None

    def _evidence(self, run: RunDir, answers: _Answers, purpose: Any) -> Evidence:
        evidence = evidence_of(run, found=answers.found)
        answers.switch_to(evidence.handle)
        fields = {name: value for answer in answers.given.values() for name, value in answer.items()}
        seconds = time.monotonic() - self._tried.get(run.path, float("-inf"))
        return replace(
            evidence,
            purpose=purpose,
            server_limit=not life.is_past(evidence, 0.0) or _has_server_limit(run),
            renewals_left=purpose == "renew" and evidence.interruptible and _renewals_left(run),
            attended=not evidence.queued or is_attended(run),
            turn=purpose == "renew" and evidence.queued and has_turn(run),
            may_rent_at=evidence.now + RENT_SECONDS * evidence.pace - seconds,
            answered=frozenset(answers.given),
            ended=frozenset(answers.ended),
            error=answers.error,
            **fields,
        )

    def _do(self, run: RunDir, action: life.Action, e: Evidence, answers: _Answers) -> None:
        """Carry out an action. Raises SchedulerError."""
        match action:
            case life.Look(question):
                answers.given[question] = self._answer(run, question, e)
            case life.Follow(handle, duplicates):
                answers.found = handle
                for duplicate in duplicates:
                    answers.ended.add(duplicate)
                    with suppress(UnendedError):  # a pod whose run is taken ends itself; `leaks` lists it
                        end_duplicate(self.client, run, duplicate.path)
            case life.Adopt(handle):
                adopt(self.copy(run), handle)
            case life.Reject(reason, usd_per_hour, limit):
                reject(self.copy(run), e.handle, reason, usd_per_hour, limit)
            case life.End(handle):
                self.end(handle)
                answers.ended.add(handle)
            case life.EndRejected(handle, reason):
                self.end(handle)
                answers.ended.add(handle)
                run.append(RejectedEnded(handle=str(handle)))
                if reason is not None:
                    record(run, "failed", "unknown", f"{reason}: its pod was ended")
            case life.Record(state, failure, reason):
                record(run, state, failure, reason)

    def _answer(self, run: RunDir, question: Question, e: Evidence) -> dict[str, Any]:
        """Look up a question and return fields of the Evidence. Raises SchedulerError."""
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
                gpu, price = pods.billed(self.client, e.handle.path, run.read_about().nodes)
                # The pod has cost money since it was requested.
                since = e.submission.time
                if e.living:  # otherwise it is rejected, with its price
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
        """Return the pod's status, queried at most every POD_SECONDS while it is live. Raises ApiError."""
        at, pod_status = self._pods.get((run.path, e.handle), (float("-inf"), ""))
        if pod_status not in life.POD_LIVES or time.monotonic() > at + POD_SECONDS * e.pace:
            pod_status = pods.status(self.client, e.handle.path)
            self._pods[run.path, e.handle] = (time.monotonic(), pod_status)
        return pod_status

    def _renew(self, run: RunDir) -> None:
        """Rent another pod, unless another process is renting one or has rented one."""
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
                else:
                    again = submission_in(run.read_events()).number > 0
                    lease(self.client, self.copy(run), "resubmitted" if again else "submitted", market)
                self.renewed.add(run.path)
        except (BusyError, UnendedError):
            pass  # another process is renting; the next poll finds the pod
        except (NotRentedError, ApiError) as error:
            wait_for_pod(run, error, queued)


def evidence_of(run: RunDir, **more: Any) -> Evidence:
    """Build the Evidence from the local records."""
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


def wait_for_pod(run: RunDir, why: SchedulerError, queued: bool) -> None:
    """Record that no pod could be rented. If the budget is spent, the run ends.

    `queued` says whether the run waited for its turn in its sweep. It keeps its place there.
    """
    from launcher.schedulers.runpod.renting import BudgetSpentError

    if isinstance(why, BudgetSpentError):
        record(run, "interrupted", "preempted", str(why))
        return
    run.append(Waiting(reason=str(why), queued=queued or None))
    then = "launcher tries again" if queued else f"`launcher logs {run.id} -f` keeps trying"
    reason = f"waits for a pod: {why}; {then}"
    replace_json(run.state, {"state": "submitted", "reason": reason, "time": now()})


def _has_server_limit(run: RunDir) -> bool:
    """Return whether RunPod itself ends the run's pods at their time limit."""
    from launcher.schedulers.runpod.profile import RunPod

    about = run.read_about()
    return RunPod.used_by(about.cluster.validated()).no_server_limit(about.nodes) is None


def _renewals_left(run: RunDir) -> bool:
    """Return whether the job and its preemption budget allow another pod."""
    from launcher.supervise.policy import spent_budgets

    job = run.read_about().job.validated()
    return job.requeue and spent_budgets(run.read_events()).get("preemptions", 0) <= job.retries.preemptions

"""The loop that is launcher's reason to exist: attempt -> verdict -> next recipe -> next attempt."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.memory.ledger import default_folder, entries, record, tells_more
from launcher.memory.measured import entry_of_run
from launcher.planning.plan import Plan
from launcher.runs.downgrades import downgrades_within, recipe_in_force
from launcher.runs.files import read_json
from launcher.runs.layout import AttemptDir, RunDir
from launcher.runs.shared import remove_handover
from launcher.spec.job import Job
from launcher.spec.recipe import Recipe
from launcher.spec.rules import Setting
from launcher.spec.verdict import EXIT_CODES, Verdict
from launcher.supervise.attempt import Ended, NodePlace, RunningAttempt, start, torchrun_tail
from launcher.supervise.host import disk_full, oom_kills
from launcher.supervise.journal import Journal
from launcher.supervise.judge import Evidence, judge, read_records, started_ranks, stopped_between_attempts
from launcher.supervise.nodes import Nodes
from launcher.supervise.policy import POLICIES, Budget, Decision, decide, spent_budgets, tried
from launcher.supervise.unread import judged_since_start

if TYPE_CHECKING:
    from launcher.supervise.apart.link import Mirror

SIGNALS = {
    signal.SIGTERM: "preempted",
    signal.SIGHUP: "preempted",
    signal.SIGINT: "cancelled",
    signal.SIGUSR2: "time-limit",
}
BACKOFF_SECONDS = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"Before the n-th restart with the same recipe: what failed may need a moment."
REASON_SECONDS = 5.0
"For the batch script to ask its controller why SIGTERM came; Slurm kills 30 s after it (KillWait)."


class RunUnreadableError(Exception):
    """The run directory lacks what a supervisor needs."""


class Supervisor:
    """One per node. `main` returns the exit code of the run."""

    def __init__(
        self,
        run: RunDir,
        place: NodePlace,
        secrets: Mapping[str, str],
        stop_file: Path | None = None,
        mirror: Mirror | None = None,
    ) -> None:
        """`stop_file` appears, with the reason in it, when a batch script wants the run to stop. `mirror`:
        where the nodes share no folder."""
        about, plan = read_json(run.run), read_json(run.plan)
        if about is None or plan is None:
            raise RunUnreadableError(
                f"{run.path} has no readable run.json and plan.json: it is no run directory"
            )
        self.run, self.place, self.secrets = run, place, secrets
        self.job = Job.model_validate(about["job"])
        self.plan = Plan.model_validate(plan)
        self.journal = Journal(run)
        self.mirror = mirror
        self.nodes = Nodes(run, place, self.journal.json, self._gives_up_waiting)
        self._spent = spent_budgets(run.read_events())
        self._signals: list[str] = []
        self._handled = 0
        self._stop_reason: str | None = None
        self._cancel_seen = ""
        self._files_checked = 0.0
        self._stop_file = stop_file
        self._told = ""
        # Elsewhere the scheduler keeps the limit and warns by a signal.
        self._scheduler = about["cluster"]["scheduler"]
        limit = self.job.resources.time if self._scheduler in ("local", "ssh") else None
        self._deadline = time.monotonic() + limit if limit is not None else None

    def main(self) -> int:
        for signum in SIGNALS:
            signal.signal(signum, self._on_signal)
        if self.mirror is not None:
            self.mirror.start(self.journal.close)  # its threads are not to take the signals
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # __main__ held them back until now
        try:
            return self._lead() if self.nodes.leader else self._follow()
        finally:
            remove_handover(self.run, self.place.rank)
            self._say_goodbye()
            self.journal.close()
            for signum in SIGNALS:  # what comes now is too late, and must not change the exit code
                signal.signal(signum, signal.SIG_IGN)

    def _say_goodbye(self) -> None:
        """What the other nodes have still to say comes first."""
        if self.mirror is not None:
            self.mirror.close()

    def _gives_up_waiting(self) -> bool:
        return bool(self._signals) or (self.mirror is not None and self.mirror.dismissed)

    def _on_signal(self, signum: int, _frame: object) -> None:
        self._signals.append(SIGNALS[signal.Signals(signum)])

    def _lead(self) -> int:
        recipe = self._first_recipe()
        self._close_interrupted_attempts()
        remove_handover(self.run, self.place.rank)  # of a supervisor that was killed
        self.journal.event("started", host=socket.gethostname(), pid=os.getpid(), nodes=self.place.count)
        while True:
            recipe, verdict, decision = self._attempt(recipe)
            exit_code = EXIT_CODES[verdict.failure]
            if decision.recipe is None:
                self._finish(verdict, decision)
                return exit_code
            policy = POLICIES[verdict.failure]
            if policy.budget is not None:
                self._spend(policy.budget, 1)
            if decision.action == "retry-lower":
                self.journal.event("downgrade", **_downgrade(verdict, decision, recipe))
            else:
                self.journal.event("retry", reason=decision.reason)
                self._pause(self._spent.get("same", 1))
            for reason in self._requests():
                self._stop_for(reason)
            if self._stop_reason is not None:
                verdict = stopped_between_attempts(self._why_stopped() or self._stop_reason)
                self._finish(verdict, Decision("stop", None, verdict.reason))
                return EXIT_CODES[verdict.failure]
            recipe = decision.recipe

    def _attempt(self, recipe: Recipe) -> tuple[Recipe, Verdict, Decision]:
        """With the recipe that was in force when it ended."""
        attempts = self.run.attempts()
        attempt = self.run.attempt(attempts[-1].number + 1 if attempts else 0)
        self.journal.json(attempt.recipe, recipe.model_dump())
        self.journal.event("attempt", attempt=attempt.number, recipe=recipe.model_dump())
        self.journal.state("running", attempt=attempt.number, host=socket.gethostname(), pid=os.getpid())
        kills = oom_kills()
        ended = self._run(attempt)
        self.nodes.report(attempt, ended, oom_kills() - kills)
        reports, lost = self.nodes.wait_for_reports(attempt)
        if self._stop_reason is None and (told := _text(attempt.stop).strip()) in SIGNALS.values():
            self._stop_reason = told  # only another node's supervisor was told to stop
        evidence = Evidence(
            ranks=self.plan.layout.ranks,
            exit_codes={0: ended.exit_code, **{n: r["exit_code"] for n, r in reports.items()}},
            errors=read_records(attempt, "errors"),
            exits=read_records(attempt, "exits"),
            stop_reason=self._why_stopped(),
            lost_nodes=lost,
            started=started_ranks(attempt),
            disk_full=disk_full(self.run.path) or any(r.get("disk_full") for r in reports.values()),
            host_oom_kills={**{n: r["oom_kills"] for n, r in reports.items()}, 0: oom_kills() - kills},
            gpus=self.plan.layout.gpus_per_node > 0,
            torchrun_lines=(ended.error,) if ended.error else tuple(torchrun_tail(attempt, 0)),
        )
        verdict = judge(evidence)
        stopping = self._stop_reason
        if verdict.failure == "unknown" or stopping is not None:
            # A signal to every process of the job ended the ranks before this one could pass it on; or
            # somebody cancels what was to go on later.
            for reason in self._requests(at_once=True):
                self._stop_for(reason)
        if self._stop_reason != stopping:
            verdict = judge(replace(evidence, stop_reason=self._why_stopped()))
        events = self.run.read_events()
        recipe = recipe_in_force(recipe, events, attempt.number)
        self._spend("lower", len(downgrades_within(events, attempt.number)))
        planned = (self.plan.recipe, *self.plan.ladder)
        earlier = judged_since_start(self.run)
        decision = decide(verdict, self.job, recipe, self._setting(), self._spent, planned, earlier)
        if self._stop_reason is not None and decision.recipe is not None:
            decision = Decision("stop", None, "asked to stop")
        if lost and self._scheduler == "ssh" and decision.recipe is not None:
            nodes = ", ".join(map(str, lost))
            decision = Decision("requeue", None, f"node {nodes} has no supervisor any more")
        self.journal.json(attempt.verdict, {**verdict.model_dump(), "then": decision.reason})
        self.journal.event(
            "ended",
            attempt=attempt.number,
            failure=verdict.failure,
            reason=verdict.reason,
            action=decision.action,
            then=decision.reason,
        )
        self.nodes.announce(attempt, decision.recipe is not None, EXIT_CODES[verdict.failure])
        print(f"[launcher] attempt {attempt.number}: {verdict.failure}: {verdict.reason}", file=sys.stderr)
        return recipe, verdict, decision

    def _spend(self, budget: Budget, times: int) -> None:
        self._spent[budget] = self._spent.get(budget, 0) + times

    def _setting(self) -> Setting:
        """The job file may keep quiet about BatchNorm; the ranks tell of it when they see the model."""
        setting = self.plan.layout.setting(self.job)
        found = any(event.get("event") == "batch-norm" for event in self.run.read_events())
        return replace(setting, batch_norm=setting.batch_norm or found)

    def _run(self, attempt: AttemptDir) -> Ended:
        """Start this node's workers and wait until none is left."""
        try:
            running = start(self.run, attempt, self.place, self.secrets)
        except OSError as error:
            print(f"[launcher] cannot start: {error}", file=sys.stderr)
            return Ended(127, f"OSError: {error}")
        if self.nodes.leader:
            self.nodes.open_attempt(attempt)
        return running.wait(lambda: self._tick(attempt, running))

    def _tick(self, attempt: AttemptDir, running: RunningAttempt) -> None:
        self.nodes.beat(attempt)
        for reason in self._requests():
            now = self._stop_for(reason) or self.job.task is None
            self.journal.event("stopping", reason=reason)
            self.journal.state("stopping", attempt=attempt.number, host=socket.gethostname(), pid=os.getpid())
            running.ask_to_stop(self._stop_reason or reason, now=now)
        if self.nodes.in_trouble(attempt):
            running.ask_to_stop("another node failed", now=True)

    def _stop_for(self, reason: str) -> bool:
        """Keep why: a cancellation goes before anything else, then the first reason. Gives whether to end the
        ranks without a checkpoint: at the second cancellation, and where SIGTERM comes during a stop, which
        SIGKILL follows."""
        before = self._stop_reason
        if before is None or reason == "cancelled":
            self._stop_reason = reason
        return before is not None and (reason == "preempted" or reason == before == "cancelled")

    def _asked_to_stop(self) -> bool:
        """Whether `_requests` would have something to say."""
        late = self._deadline is not None and time.monotonic() > self._deadline
        told = _text(self.run.cancel) != self._cancel_seen or bool(not self._told and self._reason_told())
        return late or bool(self._signals[self._handled :]) or told

    def _reason_told(self) -> str:
        """The batch script's reason to stop; it knows more than the signal that came with it."""
        text = _text(self._stop_file).strip() if self._stop_file is not None else ""
        return text if text in SIGNALS.values() else ""

    def _why_stopped(self) -> str | None:
        if self._stop_reason in (None, "cancelled"):
            return self._stop_reason
        deadline = time.monotonic() + REASON_SECONDS
        while self._stop_file is not None and not self._reason_told() and time.monotonic() < deadline:
            time.sleep(0.1)
        return self._reason_told() or self._stop_reason

    def _requests(self, *, at_once: bool = False) -> list[str]:
        """Since the last call: signals, a passed deadline, the batch script's word, the cancel file written
        (again). Files are looked at twice a second, or `at_once`."""
        requests = self._signals[self._handled :]
        self._handled += len(requests)
        if self._deadline is not None and time.monotonic() > self._deadline:
            self._deadline = None
            requests.append("time-limit")
        if at_once or time.monotonic() > self._files_checked + 0.5:
            self._files_checked = time.monotonic()
            if not self._told and (reason := self._reason_told()):
                self._told = reason
                if self._stop_reason is None and not requests:  # else a signal was here before it
                    requests.append(reason)
            content = _text(self.run.cancel)
            if content != self._cancel_seen:
                self._cancel_seen = content
                requests.append("cancelled")
        return requests

    def _pause(self, restart: int) -> None:
        deadline = time.monotonic() + BACKOFF_SECONDS[min(restart, len(BACKOFF_SECONDS)) - 1]
        while time.monotonic() < deadline and not self._asked_to_stop():
            time.sleep(0.1)

    def _finish(self, verdict: Verdict, decision: Decision) -> None:
        state = {"done": "succeeded", "requeue": "interrupted"}.get(decision.action, "failed")
        if verdict.failure == "cancelled":
            state = "cancelled"
        then = decision.reason
        if state == "failed" and (steps := tried(self.run.read_events())):
            then = f"{then}; tried before: {'; '.join(steps)}"
        self._say_goodbye()  # who reads the state below finds everything else
        self.journal.event("finished", state=state, failure=verdict.failure, reason=then)
        # The batch script, and it alone, can put the job back into the queue.
        more = {"requeue": True} if decision.action == "requeue" and self._scheduler == "slurm" else {}
        self.journal.state(state, failure=verdict.failure, reason=verdict.reason, then=then, **more)
        self._learn()

    def _learn(self) -> None:
        """What was measured corrects the next plans of this model. A ledger that cannot be written costs
        just that."""
        entry, folder = entry_of_run(self.run, self.plan.parameters), default_folder(self.run.path.parent)
        if entry is not None and tells_more(entry, entries(folder, entry.family)):
            with suppress(OSError):
                record(folder, entry)

    def _close_interrupted_attempts(self) -> None:
        """Attempts of an earlier supervisor that died before it could judge them."""
        for attempt in self.run.attempts():
            if not attempt.verdict.exists():
                reason = "the supervisor was killed, or its machine restarted, during this attempt"
                verdict = Verdict(failure="node-failed", reason=reason, node=0, confidence="likely")
                self.journal.json(attempt.verdict, {**verdict.model_dump(), "then": "resumed"})

    def _first_recipe(self) -> Recipe:
        """The plan's, or what an earlier supervisor with the same plan had stepped down to."""
        for attempt in reversed(self.run.attempts()):
            earlier = read_json(attempt.recipe)
            if earlier is not None and attempt.number >= self.run.planned_at:
                begun = Recipe.model_validate(earlier)
                return recipe_in_force(begun, self.run.read_events(), attempt.number)
        return self.plan.recipe

    def _follow(self) -> int:
        """A node other than 0: the same attempts, the leader's decisions."""
        after, go_on, exit_code = -1, True, 0
        remove_handover(self.run, self.place.rank)
        while go_on:
            attempt = self.nodes.wait_for_attempt(after)
            kills = oom_kills()
            ended = self._run(attempt)
            self.nodes.report(attempt, ended, oom_kills() - kills)
            go_on, exit_code = self.nodes.wait_for_announcement(attempt)
            after = attempt.number
        return exit_code


def _downgrade(verdict: Verdict, decision: Decision, before: Recipe) -> dict[str, Any]:
    """Of the event: what a rank writes of a downgrade in process, too."""
    changes = decision.recipe.changes_from(before) if decision.recipe is not None else {}
    return {
        "in_process": False,
        "reason": decision.reason,
        "phase": verdict.phase,
        "rank": verdict.rank,
        "step": verdict.step,
        "why_not_in_process": verdict.why_not_in_process,
        "changes": {name: list(pair) for name, pair in changes.items()},
    }


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def run_dir_of(text: str) -> RunDir:
    return RunDir(Path(text).absolute())

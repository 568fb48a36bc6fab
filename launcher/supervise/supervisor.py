"""The supervisor's loop: run an attempt, judge how it ended, choose the next recipe, start again."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.memory.ledger import default_folder, entries, is_useful, record
from launcher.memory.measured import entry_of_run
from launcher.planning.plan import Plan
from launcher.rundir.files import read_json
from launcher.rundir.find import latest_checkpoint, remove_partial_checkpoints
from launcher.rundir.layout import AttemptDir, RunDir
from launcher.rundir.model_properties import found_in_model
from launcher.rundir.recipe_changes import downgrades_within, recipe_in_force
from launcher.rundir.shared_memory_folders import remove_handover, remove_shared, with_shared
from launcher.rundir.stop import StopRequest, cancel_requests, read_stop_request, read_text
from launcher.spec.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointFailed,
    CheckpointSaved,
    Downgrade,
    Event,
    Finished,
    Retry,
    Stalled,
    Stopping,
    SupervisorStarted,
)
from launcher.spec.failures import OF_THE_CLUSTER, Budget
from launcher.spec.plugins import facts_of
from launcher.spec.recipe import Recipe
from launcher.spec.recipe_rules import Setting
from launcher.spec.verdict import EXIT_CODES, Verdict
from launcher.supervise.attempt import Ended, NodePlace, RunningAttempt, start, tail, torchrun_clues
from launcher.supervise.doctor_check import CHECK_SECONDS, why_unfit
from launcher.supervise.gpus import GpusError
from launcher.supervise.host import disk_full, oom_kills, supervisor_gone
from launcher.supervise.ignored_micro_batch import judged_since_start
from launcher.supervise.journal import Journal
from launcher.supervise.judge import (
    STOP_CLASS,
    Evidence,
    judge,
    killed_while_stopping,
    read_records,
    started_ranks,
    stopped_without_ranks,
)
from launcher.supervise.nodes import Nodes
from launcher.supervise.policy import (
    FRUITLESS,
    MAX_FRUITLESS,
    Decision,
    after_check,
    decide,
    downgrade_reasons,
    fruitless_starts,
    spent_budgets,
)
from launcher.supervise.process import adopt_orphans
from launcher.supervise.stall import Stall
from launcher.supervise.sweep_queue import QueueError
from launcher.supervise.sweep_turn import VISIBLE, Turn
from launcher.supervise.takeover import KILLED, close_attempts, first_recipe
from launcher.supervise.unsaved_state import Outcome, UnsavedState, skipped_by, unsaved, written_since

if TYPE_CHECKING:
    from launcher.supervise.no_shared_folder.link import Mirror

SIGNALS = {
    signal.SIGTERM: "preempted",
    signal.SIGHUP: "preempted",
    signal.SIGINT: "cancelled",
    signal.SIGUSR2: "time-limit",
}
BACKOFF_SECONDS = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"Pauses before restarts with the same recipe, because the cause may need a moment to go away."
REASON_SECONDS = 5.0
"How long the batch script may take to ask Slurm why SIGTERM came. Slurm kills 30 s after it (KillWait)."
STOP_SECONDS = 120.0
"Time from a request to stop until the ranks are killed, if neither the job nor the profile sets one."
TURN_SECONDS = 0.5
"Pause between two attempts to get a GPU or place. One run of a host queries nvidia-smi at a time."
NO_TIME = "no time was left to save"
GRACE_SECONDS = 2.0
"How much later than node 0 the other nodes may start and report their checks."
GONE_SECONDS = 5.0
"How long the run directory must be missing to count as deleted."
LEAVE_SECONDS = 8.0
"Part of the scheduler's remaining time kept for recording how ranks ended and for requeueing."


class RunUnreadableError(Exception):
    """The run directory lacks a file that a supervisor needs."""


class Supervisor:
    """The supervisor of one node. `main` returns the exit code of the run."""

    def __init__(
        self,
        run: RunDir,
        place: NodePlace,
        secrets: Mapping[str, str],
        stop_file: Path | None = None,
        mirror: Mirror | None = None,
    ) -> None:
        """`stop_file`: the batch script writes the reason into it to stop the run.

        `mirror`: copies files between nodes that share no folder.
        """
        about, plan = run.read_about(), read_json(run.plan)
        if about.cluster.scheduler is None or plan is None:
            raise RunUnreadableError(
                f"{run.path} has no readable run.json and plan.json: it is not a run directory"
            )
        self.run, self.place, self.secrets = run, place, secrets
        self.job = about.job.validated()
        self.plan = Plan.model_validate(plan)
        self.journal = Journal(run, place.rank)
        self.mirror = mirror
        self.nodes = Nodes(run, place, self.journal.json, self._stops_waiting)
        self._spent = spent_budgets(run.read_events())
        self._signals: list[str] = []
        self._handled_signals = 0
        self._stop_reason: str | None = None
        self._unrecorded: list[str] = []
        "Requests to stop that are not recorded yet."
        self._stopped_at = 0.0
        self._kill_at: float | None = None
        "When ranks that were asked to stop are killed, by time.monotonic."
        self._printed_kill_at: float | None = None
        self._stop_seconds = self.job.stop_timeout or about.cluster.slurm.signal_seconds or STOP_SECONDS
        self._at_once = False
        "Whether the ranks end without a checkpoint."
        self._cancel_seen = ""
        self._files_checked = 0.0
        self._folder = run.path.stat()
        self._missing_since: float | None = None
        "When the run directory was first missing, by time.monotonic."
        self._attempt_ended = 0.0
        "By time.monotonic."
        self._stop_file = stop_file
        self._last_request = StopRequest()
        self._facts = facts_of(about.cluster.scheduler)
        self._deadline: float | None = None
        "When `resources.time` is over, by time.monotonic. Schedulers with a queue enforce it themselves."

    def main(self) -> int:
        for signum in SIGNALS:
            signal.signal(signum, self._on_signal)
        adopt_orphans()
        if self.mirror is not None:
            self.mirror.start(self.journal.close)  # before unblocking, so that its threads get no signals
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # blocked since __main__
        _remove_leftovers_of_others(self.run)
        try:
            return self._lead() if self.nodes.leader else self._follow()
        finally:
            remove_handover(self.run, self.place.rank)
            self._close_mirror()
            self.journal.close()
            for signum in SIGNALS:  # a signal this late must not change the exit code
                signal.signal(signum, signal.SIG_IGN)

    def _close_mirror(self) -> None:
        """Send the last files to the other nodes and receive theirs."""
        if self.mirror is not None:
            self.mirror.close()

    def _stops_waiting(self) -> bool:
        return bool(self._signals) or (self.mirror is not None and self.mirror.closed_by_node_0)

    def _on_signal(self, signum: int, _frame: object) -> None:
        reason = SIGNALS[signal.Signals(signum)]
        if self._stop_file is not None and reason == "time-limit":
            reason = "preempted"  # the batch script reports a time limit in the stop file
        self._signals.append(reason)

    def _lead(self) -> int:
        recipe = first_recipe(self.run, self.plan)
        close_attempts(self.run, self.journal, KILLED, "resumed")
        self.nodes.take_over()
        remove_handover(self.run, self.place.rank)  # left by a supervisor that was killed
        if (
            self._fruitless_starts(self.run.read_events()) >= MAX_FRUITLESS
        ):  # killed before they could record it
            return self._finish(
                Verdict(failure="preempted", reason=FRUITLESS), Decision("stop", None, FRUITLESS)
            )
        try:
            self._wait_for_turn()
        except (GpusError, QueueError) as error:
            stop = Decision("stop", None, "nothing was started")
            return self._finish(Verdict(failure="node-failed", reason=str(error)), stop)
        self._start_clock()
        self.journal.event(
            SupervisorStarted(host=socket.gethostname(), pid=os.getpid(), nodes=self.place.count)
        )
        while True:
            for reason in self._requests(at_once=True):
                self._stop_for(reason)
            if self._stop_reason is not None:
                why = self._why_stopped() or self._stop_reason
                verdict = stopped_without_ranks(why, before_first=not self.run.attempts())
                return self._finish(verdict, self._decide(verdict, recipe, self.run.read_events()))
            recipe, verdict, decision = self._attempt(recipe)
            if decision.recipe is None:
                return self._finish(verdict, decision)
            self._spend("lower" if decision.action == "retry-lower" else "same", 1)
            if decision.action == "retry-lower":
                self.journal.event(_downgrade(verdict, decision, recipe))
            else:
                self.journal.event(Retry(reason=decision.reason))
                self._pause(self._spent.get("same", 1))
            recipe = decision.recipe

    def _attempt(self, recipe: Recipe) -> tuple[Recipe, Verdict, Decision]:
        """Run one attempt. The returned recipe is the one in force when the attempt ended."""
        attempts = self.run.attempts()
        attempt = self.run.attempt(attempts[-1].number + 1 if attempts else 0)
        self.journal.json(attempt.recipe, recipe.model_dump())
        self.journal.event(AttemptStarted(attempt=attempt.number, recipe=recipe.model_dump()))
        self._record_state("running", attempt=attempt.number)
        began = time.time()
        evidence = self._run_to_end(attempt)
        self._attempt_ended = time.monotonic()
        lost = evidence.lost_nodes
        verdict = judge(evidence)
        stopping = self._stop_reason
        if verdict.failure in ("unknown", "preempted") or stopping is not None:
            # A signal to every process of the job may end the ranks before this process passes it on, and
            # their output does not say why. Or a user cancels a run that would be requeued.
            for reason in self._requests(at_once=True):
                self._stop_for(reason)
        if self._stop_reason != stopping:
            verdict = judge(replace(evidence, stop_reason=self._why_stopped()))
        events = self.run.read_events()
        recipe = recipe_in_force(recipe, events, attempt.number)
        self._spend("lower", len(downgrades_within(events, attempt.number)))
        killed = self._stop_reason is not None and any(map(killed_while_stopping, evidence.exits))
        in_vain = killed and not written_since(self.run.checkpoints, began)
        extra: dict[str, Any] = {"in_vain": True} if in_vain else {}
        ended = AttemptEnded(attempt=attempt.number, failure=verdict.failure, reason=verdict.reason, **extra)
        decision = self._decide(verdict, recipe, [*events, ended])
        if lost and not self._facts.replaces_nodes and decision.recipe is not None:
            nodes = ", ".join(map(str, lost))
            decision = Decision("requeue", None, f"node {nodes} has no supervisor any more")
        code = EXIT_CODES[verdict.failure]
        examines = decision.recipe is not None and verdict.failure in OF_THE_CLUSTER
        if examines:
            self.nodes.announce(attempt, True, code, checks=True)
            decision = self._after_examination(attempt, decision, lost)
        self.journal.json(attempt.verdict, {**verdict.model_dump(), "then": decision.reason})
        self.journal.event(ended.replace(action=decision.action, then=decision.reason))
        saves = decision.recipe is None and self._prepare_to_save(attempt.number) is not None
        if not examines:
            self.nodes.announce(attempt, decision.recipe is not None, code, saves=saves)
        print(f"[launcher] attempt {attempt.number}: {verdict.failure}: {verdict.reason}", file=sys.stderr)
        return recipe, verdict, decision

    def _decide(self, verdict: Verdict, recipe: Recipe, events: Sequence[Event]) -> Decision:
        planned = (self.plan.recipe, *self.plan.ladder)
        earlier = judged_since_start(self.run)
        decision = decide(verdict, self.job, recipe, self._setting(), self._spent, planned, earlier)
        if self._stop_reason is not None and decision.recipe is not None:
            if verdict.failure != "node-failed" or not self.job.requeue:
                return Decision("stop", None, "asked to stop")
            decision = Decision("requeue", None, verdict.reason)
        if decision.action == "requeue" and self._fruitless_starts(events) >= MAX_FRUITLESS:
            return Decision("stop", None, FRUITLESS)
        return decision

    def _after_examination(self, attempt: AttemptDir, decision: Decision, lost: Sequence[int]) -> Decision:
        """Examine the nodes before `decision` is carried out. On Slurm the run leaves unfit nodes."""
        deadline = time.monotonic() + CHECK_SECONDS + GRACE_SECONDS
        unfit = self.nodes.unfit(attempt, self._why_unfit(attempt), deadline, lost)
        checked = after_check(decision, unfit, self.place.count, self._facts.requeues and self.job.requeue)
        if unfit:
            print(f"[launcher] {checked.reason}", file=sys.stderr)
        if self._asked_to_stop():
            return decision
        return checked

    def _why_unfit(self, attempt: AttemptDir) -> str:
        def asked() -> bool:
            self.nodes.beat(attempt)
            return self._asked_to_stop()

        return why_unfit(self.run, attempt, self.place, self.secrets, asked)

    def _run_to_end(self, attempt: AttemptDir) -> Evidence:
        """Start the ranks of all nodes, wait until they have ended and collect the evidence."""
        kills = oom_kills()
        self._stall = Stall(attempt, self.job.stall_timeout)
        ended = self._run(attempt)
        self.nodes.report(attempt, ended, oom_kills() - kills)
        reports, lost = self.nodes.wait_for_reports(attempt, self._no_time_left, self._stops)
        if (
            self._stop_reason is None
            and (reason := read_stop_request(attempt.stop).reason) in SIGNALS.values()
        ):
            self._stop_for(reason)  # only another node's supervisor was asked to stop
            self.journal.event(Stopping(reason=reason))
        codes = {0: ended.exit_code, **{n: r["exit_code"] for n, r in reports.items()}}
        first = self.nodes.failed_first(attempt)
        return Evidence(
            ranks=self.plan.layout.ranks,
            exit_codes={node: codes[node] for node in sorted(codes, key=lambda node: node not in first)},
            errors=read_records(attempt, "errors"),
            exits=read_records(attempt, "exits"),
            stop_reason=self._why_stopped(),
            lost_nodes=lost,
            started=started_ranks(attempt),
            disk_full=disk_full(self.run.path) or any(r.get("disk_full") for r in reports.values()),
            host_oom_kills={**{n: r["oom_kills"] for n, r in reports.items()}, 0: oom_kills() - kills},
            gpus=self.plan.layout.gpus_per_node > 0,
            stalled=self._stall.after if self._stall.stalled else None,
            torchrun_lines=(ended.error,) if ended.error else tuple(tail(attempt.torchrun_log(0))),
            torchrun_clues=torchrun_clues(attempt, self.run.read_about()),
        )

    def _prepare_to_save(self, number: int) -> UnsavedState | None:
        """Prepare to save the state that attempt `number`, the last one, left in shared memory.

        Return None if there is no such state or no time to save it.
        """
        events = self.run.read_events()
        kept = unsaved(events)
        if kept is None or self._no_time_left():
            return None
        # Use the recipe that trained the state: its ranks hold the same shards, and it fitted into memory.
        begun = Recipe.model_validate(self.run.read_recipe(self.run.attempt(kept.attempt)))
        recipe = recipe_in_force(begun, events, kept.attempt)
        self.journal.json(self.run.saving(number).recipe, recipe.model_dump())
        return kept

    def _save_last_state(self, verdict: Verdict) -> Outcome | None:
        """Let the ranks write a state in shared memory as a checkpoint. Return None if there was none."""
        attempts = self.run.attempts()
        if not attempts:
            return None
        number, newest = attempts[-1].number, latest_checkpoint(self.run) or 0
        saving, kept = self.run.saving(number), self._prepare_to_save(number)
        if kept is None:
            events = self.run.read_events()
            if (lost := unsaved(events)) is not None:
                return Outcome(lost.step, NO_TIME, newest)
            skipped = skipped_by(events, number)
            return Outcome(*skipped, newest) if skipped is not None and skipped.step > newest else None
        reason_of_state = f"the state of step {kept.step} is being written as a checkpoint"
        self._record_state("stopping", attempt=number, reason=reason_of_state)
        evidence = self._run_to_end(saving)
        remove_partial_checkpoints(self.run)  # no rank is still writing
        self.nodes.announce(saving, False, EXIT_CODES[verdict.failure])
        newest, source = latest_checkpoint(self.run) or 0, "shared-memory"
        if newest >= kept.step:
            path = str(self.run.checkpoints / f"step-{kept.step:08d}")
            self.journal.event(CheckpointSaved(step=kept.step, path=path, from_=source, attempt=number))
            return Outcome(kept.step, "", newest)
        verdict_of_save = judge(replace(evidence, stop_reason=None))
        reason = NO_TIME if self._no_time_left() else verdict_of_save.exception or verdict_of_save.reason
        self.journal.event(CheckpointFailed(step=kept.step, reason=reason, from_=source, attempt=number))
        return Outcome(kept.step, reason, newest)

    def _record_state(self, state: str, **fields: Any) -> None:
        """Record a state in which this process keeps running."""
        self.journal.state(state, **fields, host=socket.gethostname(), pid=os.getpid())

    def _spend(self, budget: Budget, times: int) -> None:
        self._spent[budget] = self._spent.get(budget, 0) + times

    def _fruitless_starts(self, events: Sequence[Event]) -> int:
        return fruitless_starts(events, command=self.job.task is None)

    def _setting(self) -> Setting:
        """Return the plan's setting, updated with what the ranks have measured about the model."""
        measured = found_in_model(self.run.read_events())
        return replace(self.plan.layout.setting(self.job), **measured)

    def _run(self, attempt: AttemptDir) -> Ended:
        """Start this node's workers and wait until all have ended."""
        try:
            self.run.checkpoints.mkdir(exist_ok=True)  # S3, and so RunPod, keeps no empty folder
            running = start(self.run, attempt, self.place, self.secrets, sends_sigterm=self.job.task is None)
        except OSError as error:
            print(f"[launcher] cannot start: {error}", file=sys.stderr)
            return Ended(127, f"OSError: {error}")
        if self.nodes.leader:
            self.nodes.open_attempt(attempt)
        ended = running.wait(lambda: self._tick(attempt, running))
        self._record_requests(ended=True)
        return ended

    def _tick(self, attempt: AttemptDir, running: RunningAttempt) -> None:
        self.nodes.beat(attempt)
        if self._stop_reason is None and self._deleted():
            print(f"[launcher] {self.run.path} was deleted: the run ends", file=sys.stderr)
            with contextlib.suppress(OSError):  # its last records are as private as it was
                self.run.path.mkdir(parents=True, exist_ok=True)
                self.run.path.chmod(stat.S_IMODE(self._folder.st_mode))
            self._stop_for("cancelled")
        for reason in self._requests():
            self._stop_for(reason)
            if self.nodes.leader:  # node 0 writes the records that all nodes share
                self._unrecorded.append(reason)
                self._record_state("stopping", attempt=attempt.number)
        if self._stop_reason is not None and self._kill_at is not None:
            self._print_deadline()
            running.ask_to_stop(self._stop_reason, self._kill_at)
        self._record_requests()  # who reads the event may count on it that the ranks are asked
        if self.nodes.leader and self._stall.newly_stalled():
            self.journal.event(Stalled(attempt=attempt.number, seconds=self._stall.after))
            running.end_failed()
        if self.nodes.another_node_failed(attempt):
            running.end_failed()

    def _deleted(self) -> bool:
        """Return whether the run directory was deleted or moved, so that no one can find or stop the run."""
        try:
            # A rank may have created a new folder. Some network file systems change a folder's inode number.
            exists = self.run.path.stat().st_ino == self._folder.st_ino or bool(self.run.run.stat())
        except OSError as error:
            exists = error.errno != errno.ENOENT or not self._mounted()
        if exists:
            self._missing_since = None
        elif self._missing_since is None:
            self._missing_since = time.monotonic()
        return self._missing_since is not None and time.monotonic() > self._missing_since + GONE_SECONDS

    def _mounted(self) -> bool:
        """Return whether the file system of the run directory is mounted. If not, nothing was deleted."""
        for folder in self.run.path.parents:
            with contextlib.suppress(OSError):  # the nearest one that exists
                return folder.stat().st_dev == self._folder.st_dev
        return False

    def _stop_for(self, reason: str) -> None:
        """Record why the run stops: a cancellation overrides other reasons, otherwise the first one counts.

        A second cancellation ends the ranks at once.
        """
        earlier = self._stop_reason
        if earlier is None:
            self._stopped_at = time.monotonic()
        if earlier is None or reason == "cancelled":
            self._stop_reason = reason
        self._at_once = self._at_once or reason == earlier == "cancelled"
        if self._at_once:
            self._kill_at = time.monotonic()
        elif self._kill_at is None:
            self._kill_at = time.monotonic() + self._stop_seconds

    def _record_requests(self, *, ended: bool = False) -> None:
        """Record the requests to stop, each with its cause, which the batch script writes after the signal.

        `ended`: no later call follows.
        """
        if not self._unrecorded:
            return
        recorded = self._why_stopped() if ended else self._job_request().reason
        waits = self._stop_file is not None and not recorded and "cancelled" not in self._unrecorded
        if ended or not waits or time.monotonic() > self._stopped_at + REASON_SECONDS:
            for reason in self._unrecorded:
                self.journal.event(Stopping(reason=reason if reason == "cancelled" else recorded or reason))
            self._unrecorded.clear()

    def _print_deadline(self) -> None:
        """Print once per deadline how long the ranks have. Wait a moment for the batch script's deadline."""
        if self._kill_at is None or self._kill_at == self._printed_kill_at:
            return
        waits = self._stop_file is not None and self._last_request.seconds_left() is None
        if waits and time.monotonic() < self._stopped_at + REASON_SECONDS:
            return
        self._printed_kill_at = self._kill_at
        left = max(0.0, self._kill_at - time.monotonic())
        action = "save and end" if not self._at_once else "end"
        reason = self._last_request.reason if self._stop_reason != "cancelled" else ""
        print(
            f"[launcher] {reason or self._stop_reason}: the ranks have {left:.0f} s to {action}",
            file=sys.stderr,
        )

    def _no_time_left(self) -> bool:
        return self._kill_at is not None and time.monotonic() > self._kill_at

    def _stops(self) -> bool:
        return self._stop_reason is not None or self._asked_to_stop()

    def _asked_to_stop(self) -> bool:
        """Return whether `_requests` would return a request."""
        late = self._deadline is not None and time.monotonic() > self._deadline
        cancelled = cancel_requests(read_text(self.run.cancel), self._cancel_seen) > 0
        by_job = not self._last_request.reason and self._job_request().reason != ""
        return late or bool(self._signals[self._handled_signals :]) or cancelled or by_job

    def _job_request(self) -> StopRequest:
        """Return the batch script's request in the stop file. It says more than the signal sent with it."""
        request = read_stop_request(self._stop_file) if self._stop_file is not None else StopRequest()
        return request if request.reason in STOP_CLASS else StopRequest()

    def _why_stopped(self) -> str | None:
        if self._stop_reason in (None, "cancelled"):
            return self._stop_reason
        deadline = time.monotonic() + REASON_SECONDS
        while self._stop_file is not None and not self._job_request().reason and time.monotonic() < deadline:
            time.sleep(0.1)
        return self._job_request().reason or self._stop_reason

    def _requests(self, *, at_once: bool = False) -> list[str]:
        """Return the requests to stop since the last call.

        They are signals, a passed deadline, the batch script's stop file, and the lines of the cancel file.
        Files are read twice a second, or now if `at_once`.
        """
        requests = self._signals[self._handled_signals :]
        self._handled_signals += len(requests)
        if self._deadline is not None and time.monotonic() > self._deadline:
            self._deadline = None
            requests.append("time-limit")
        if at_once or time.monotonic() > self._files_checked + 0.5:
            self._files_checked = time.monotonic()
            request = self._job_request()
            if (
                request.reason
                and not self._last_request.reason
                and self._stop_reason is None
                and not requests
            ):
                # No signal has asked for it yet. The ranks get a reason that a signal may have.
                requests.append(request.reason if request.reason in SIGNALS.values() else "preempted")
            left = request.seconds_left()
            if left is not None and request != self._last_request and not self._at_once:
                self._kill_at = time.monotonic() + max(left - LEAVE_SECONDS, left / 2)
            self._last_request = request
            content = read_text(self.run.cancel)
            requests += ["cancelled"] * cancel_requests(content, self._cancel_seen)
            self._cancel_seen = content
        return requests

    def _wait_for_turn(self) -> None:
        """Wait for GPUs and a place in the sweep, or for a request to stop.

        A single run on another machine gets its GPUs before its supervisor starts. Raises GpusError,
        QueueError.
        """
        elsewhere = self._facts.runs_elsewhere
        if self._facts.has_queue or (elsewhere and not self.run.read_about().sweep):
            return
        gpu_count = self.plan.layout.gpus_per_node if VISIBLE not in self.job.env else 0
        # The attribute keeps the locks as long as this process lives.
        self._turn = Turn(self.run, gpu_count, os.environ, shared=not elsewhere)
        printed = ""
        while (why := self._turn.take()) and not self._asked_to_stop():
            if why != printed:
                printed = why
                self._record_state("submitted", reason=why)
            time.sleep(TURN_SECONDS)

    def _start_clock(self) -> None:
        """Count `resources.time` from now, so that waiting for a turn does not count."""
        if self.job.resources.time is not None and not self._facts.has_queue:
            self._deadline = time.monotonic() + self.job.resources.time

    def _pause(self, restart: int) -> None:
        deadline = self._attempt_ended + BACKOFF_SECONDS[min(restart, len(BACKOFF_SECONDS)) - 1]
        while time.monotonic() < deadline and not self._asked_to_stop():
            time.sleep(0.1)

    def _finish(self, verdict: Verdict, decision: Decision) -> int:
        """Record how the run ended. Return its exit code."""
        exit_code = EXIT_CODES[verdict.failure]
        state = {"done": "succeeded", "requeue": "interrupted"}.get(decision.action, "failed")
        if verdict.failure == "cancelled":
            state = "cancelled"
        then = decision.reason
        if state == "failed" and (steps := downgrade_reasons(self.run.read_events())):
            then = f"{then}; tried before: {'; '.join(steps)}"
        if (outcome := self._save_last_state(verdict)) is not None:
            then = f"{then}; {outcome.words()}"
            print(f"[launcher] {outcome.words()}", file=sys.stderr)
        self.nodes.close(exit_code)
        self._close_mirror()  # before the state below, so that its readers find everything else
        last: dict[str, Any] = {"last_state": outcome._asdict()} if outcome is not None else {}
        self.journal.event(Finished(state=state, failure=verdict.failure, reason=then, **last))
        # Only the batch script can requeue the job.
        requeue_fields: dict[str, Any] = {}
        if decision.action == "requeue" and self._facts.requeues:
            requeue_fields = {"requeue": True, "leaves": " ".join(map(str, decision.leaves))}
        self.journal.state(state, failure=verdict.failure, reason=verdict.reason, then=then, **requeue_fields)
        self._record_measurement()
        return exit_code

    def _record_measurement(self) -> None:
        """Record the measured memory, which corrects later plans of this model.

        Errors in writing the ledger are ignored.
        """
        entry, folder = entry_of_run(self.run, self.plan.parameters), default_folder(self.run.path.parent)
        if entry is not None and is_useful(entry, entries(folder, entry.family)):
            with contextlib.suppress(OSError):
                record(folder, entry)

    def _follow(self) -> int:
        """Run the attempts of a node other than 0, as node 0 decides."""
        after, go_on, exit_code = -1, True, 0
        self._start_clock()
        remove_handover(self.run, self.place.rank)
        abandoned = self.nodes.abandoned_attempt()
        while go_on:
            attempt = abandoned or self.nodes.wait_for_attempt(after)
            if isinstance(attempt, int):
                return attempt
            kills = oom_kills()
            ended = self._run(attempt) if abandoned is None else Ended(-signal.SIGKILL)
            abandoned = None
            if attempt.only_saves and self.place.no_shared_folder:
                remove_partial_checkpoints(self.run)
            self.nodes.report(attempt, ended, oom_kills() - kills)
            go_on, exit_code, examines = self.nodes.wait_for_announcement(attempt)
            if examines:
                self.nodes.report_check(attempt, self._why_unfit(attempt))
            after = attempt.number
        return exit_code


def _remove_leftovers_of_others(run: RunDir) -> None:
    """Remove the shared memory of neighbouring runs whose processes on this host were killed all at once."""
    for other in with_shared(run.path.parent):
        if other.path != run.path and supervisor_gone(other):
            remove_shared(other)


def _downgrade(verdict: Verdict, decision: Decision, recipe: Recipe) -> Downgrade:
    """Return the event of a downgrade. A rank writes the same event for a downgrade in process."""
    changes = decision.recipe.changes_from(recipe) if decision.recipe is not None else {}
    left_out: dict[str, Any] = {"left_out": list(decision.left_out)} if decision.left_out else {}
    return Downgrade(
        in_process=False,
        reason=decision.reason,
        phase=verdict.phase,
        rank=verdict.rank,
        step=verdict.step,
        why_not_in_process=verdict.why_not_in_process,
        changes=changes,
        **left_out,
    )

"""Read the results of a doctor's run from its run directory."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from launcher.doctor.examine import examine, worst
from launcher.doctor.interpret import values_of
from launcher.doctor.options import Options
from launcher.doctor.order_files import END, Orders
from launcher.doctor.page import page
from launcher.doctor.values import Expected, Finding, Measured, Verdict
from launcher.rundir.files import read_record
from launcher.rundir.layout import AttemptDir, RunDir
from launcher.spec.quantities import counted

NOT_ENDED = "has not ended"
CUT_OFF = frozenset({"preempted", "time-limit", "host-oom"})
"Failures that end a run from outside, so that nothing is known about what was not examined."
NOT_EXAMINED = (
    "Anything that is not on this page was not examined, and may be good or broken. `launcher why RUN` says "
    "how the run ended. Then examine again: `launcher resume RUN`, or a new `launcher doctor`."
)
DAMAGED = (
    "Anything that is not on this page is unknown, and may be good or broken. Restore the file from a "
    "backup, or run `launcher doctor` again."
)


@dataclass(frozen=True)
class Results:
    """What a doctor's run has measured so far, and the findings from it."""

    run: RunDir
    cluster: str
    options: Options
    expected: Expected
    values: tuple[Measured, ...]
    unfinished: str = ""
    "Why the examination is incomplete, such as `has not ended` or `was cancelled`; empty if it is complete."
    ended: bool = True
    "Whether the run has ended, so that no more values will follow."
    damaged: bool = False
    "Whether files with results cannot be read."

    @property
    def findings(self) -> list[Finding]:
        return examine(self.values, self.expected)

    @property
    def verdict(self) -> Verdict | None:
        """The worst verdict; None if nothing is broken so far and the examination is incomplete."""
        worst_verdict = worst(self.findings)
        return None if self.unfinished and worst_verdict != "broken" else worst_verdict

    @property
    def cut_off(self) -> bool:
        """Whether the run has ended with an incomplete examination."""
        return self.ended and bool(self.unfinished)

    @property
    def node_died(self) -> bool:
        """Whether a node has stopped answering, which ends the examination."""
        return any(value.check == "alive" for value in self.values)

    def page(self) -> list[str]:
        """Return the page as lines of text."""
        expected, name = self.expected, self.run.id
        title = (
            f"doctor: {self.cluster}, {counted(expected.nodes, 'node')}, {counted(expected.ranks, 'rank')}, "
            f"{expected.backend}, {self.options.level}; run {self.run.id}"
            f"{', which ' * bool(self.unfinished)}{self.unfinished}"
        )
        hosts = {
            value.node: str(value.value) for value in self.values if value.check == "host" and value.value
        }

        def with_name(text: str) -> str:
            return re.sub(r"\bRUN\b", name, text)

        findings = [
            replace(finding, cause=with_name(finding.cause), cure=with_name(finding.cure))
            for finding in self.findings
        ]
        note = DAMAGED if self.damaged else with_name(NOT_EXAMINED) if self.cut_off else ""
        return page(title, findings, expected.nodes, hosts, note)

    def as_json(self) -> dict[str, Any]:
        return {
            "run_id": self.run.id,
            "cluster": self.cluster,
            "level": self.options.level,
            "nodes": self.expected.nodes,
            "ranks": self.expected.ranks,
            "backend": self.expected.backend,
            "complete": not self.unfinished,
            "unfinished": self.unfinished,
            "verdict": self.verdict,
            "findings": [asdict(finding) for finding in self.findings],
            "measured": [asdict(value) for value in self.values],
        }


def results_of(run: RunDir, *, ended: bool = True) -> Results | None:
    """Return the results of a run, or None if it is not a doctor's run. `ended` says if the run has ended."""
    about, plan = run.read_about(), read_record(run.plan)
    options = Options.of_command(about.job.command or ())
    if options is None:
        return None
    expected = Expected.of(about, plan, options.job)
    attempt = next(reversed(run.attempts()), run.attempt(0))  # a run that was cut off may be resumed
    orders = Orders(attempt.path / "doctor", 0, expected.nodes)
    (failure, reason), history = _end_of(run, attempt), orders.history()
    is_complete = bool(history) and history[-1][0].get("do") == END
    all_answered = len(orders.answers(0)) == expected.nodes
    unfinished = _why_unfinished(failure, reason, is_complete, all_answered) if ended else NOT_ENDED
    if damaged := orders.damaged() if ended else []:
        others = f" and {len(damaged) - 1} other files" if len(damaged) > 1 else ""
        unfinished = f"has files that cannot be read: {damaged[0]}{others}"
    if ended and unfinished and not is_complete and history and history[-1][0]:
        history[-1] = (history[-1][0], {})  # drop answers that the run's end may have affected
    values = [
        *_of_run(orders, expected, reason, not unfinished),
        *values_of(history, expected.nodes),
    ]
    return Results(
        run, about.cluster.name or "", options, expected, tuple(values), unfinished, ended, bool(damaged)
    )


def _end_of(run: RunDir, attempt: AttemptDir) -> tuple[str | None, str]:
    """Return the failure of a run, and the reason for it, which is empty if the run succeeded.

    The failure is None if it is unknown: the supervisor was killed, or has not ended.
    """
    record, state = attempt.read_verdict(), run.read_state()
    end = record.verdict if record is not None else state
    if (record is None and state.state == "lost") or not end.failure:
        return None, ""
    return end.failure, "" if end.failure == "succeeded" else end.reason


def _why_unfinished(failure: str | None, reason: str, is_complete: bool, all_answered: bool) -> str:
    """Return why the examination of an ended run is incomplete, or "" if it is complete.

    `is_complete`: whether node 0 gave the last order. `all_answered`: whether every node began to examine
    itself. If one did not, the failure of the run itself, such as a missing image, is the finding.
    """
    if failure is None:
        return "was lost"
    if failure == "cancelled":
        return "was cancelled"
    if failure in CUT_OFF or (not is_complete and (all_answered or failure == "node-failed")):
        return f"ended too early: {reason or 'the doctor itself failed'}"
    return ""


def _of_run(orders: Orders, expected: Expected, ending: str, complete: bool) -> Sequence[Measured]:
    """Return values of the run as a whole: which nodes answered, and how its ranks connected.

    Missing values are findings only if the run is complete. `ending` is why it ended without success.
    """
    answers = orders.answers(0)
    values = [
        Measured("answers", node, True) if node in answers else Measured("answers", node, None, error=ending)
        for node in range(expected.nodes)
        if complete or node in answers
    ]
    started = [read_record(file) for file in sorted(orders.folder.glob("rank-*.json"))]
    if complete:
        error = ending if len(started) < expected.ranks else ""
        values.append(Measured("ranks", 0, len(started), error=error))
    slowest = max((record.get("connect_seconds", 0.0) for record in started), default=None)
    return [*values, *([Measured("connect", 0, round(slowest, 3))] if slowest is not None else [])]

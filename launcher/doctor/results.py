"""Read the results of a doctor's run from its run directory."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher.doctor.board import Board
from launcher.doctor.examine import examine, worst
from launcher.doctor.interpret import values_of
from launcher.doctor.options import Options
from launcher.doctor.page import page
from launcher.doctor.values import Expected, Finding, Measured, Verdict
from launcher.rundir.files import read_record
from launcher.rundir.layout import RunDir


@dataclass(frozen=True)
class Results:
    """What a doctor's run has measured so far, and what follows from it."""

    run: RunDir
    cluster: str
    options: Options
    expected: Expected
    values: tuple[Measured, ...]
    unfinished: str = ""
    "`has not ended` or `was cancelled`, if values are missing for that reason."

    @property
    def findings(self) -> list[Finding]:
        return examine(self.values, self.expected)

    @property
    def verdict(self) -> Verdict:
        return worst(self.findings)

    @property
    def node_died(self) -> bool:
        """Whether a node has stopped answering. The examination ends with that."""
        return any(value.check == "alive" for value in self.values)

    def page(self) -> list[str]:
        """Return the page for a person."""
        per, name = self.expected, self.run.id
        title = (
            f"doctor: {self.cluster}, {_count(per.nodes, 'node')}, {_count(per.ranks, 'rank')}, "
            f"{per.backend}, {self.options.level}; run {self.run.id}"
            f"{', which ' * bool(self.unfinished)}{self.unfinished}"
        )
        hosts = {one.node: str(one.value) for one in self.values if one.check == "host" and one.value}
        found = [
            replace(one, cause=re.sub(r"\bRUN\b", name, one.cause), cure=re.sub(r"\bRUN\b", name, one.cure))
            for one in self.findings
        ]
        return page(title, found, per.nodes, hosts)

    def as_json(self) -> dict[str, Any]:
        return {
            "run_id": self.run.id,
            "cluster": self.cluster,
            "level": self.options.level,
            "nodes": self.expected.nodes,
            "ranks": self.expected.ranks,
            "backend": self.expected.backend,
            "complete": not self.unfinished,
            "verdict": self.verdict,
            "findings": [one.as_json() for one in self.findings],
            "measured": [one.as_json() for one in self.values],
        }


def results_of(run: RunDir, *, ended: bool = True) -> Results | None:
    """Return the results of a run; None if it is not a doctor's. `ended`: whether nothing more follows."""
    about, plan = read_record(run.run), read_record(run.plan)
    options = Options.of_command(about.get("job", {}).get("command") or ())
    if options is None:
        return None
    expected = Expected.of(about, plan, options.job)
    folder = run.attempt(0).path / "doctor"
    board = Board(folder, 0, expected.nodes)
    judged = run.attempt(0).read_verdict()
    cancelled = judged is not None and judged.verdict.failure == "cancelled"
    unfinished = "has not ended" if not ended else "was cancelled" if cancelled else ""
    values = [
        *_of_run(run, folder, board, expected, not unfinished),
        *values_of(board.history(), expected.nodes),
    ]
    name = str(about.get("cluster", {}).get("name", ""))
    return Results(run, name, options, expected, tuple(values), unfinished)


def _of_run(
    run: RunDir, folder: Path, board: Board, expected: Expected, complete: bool
) -> Sequence[Measured]:
    """Values of the run as a whole: which nodes answered, and how its ranks connected.

    What is missing is a finding only if the run is complete.
    """
    answers, said = board.answers(0), _why_ended(run)
    found = [
        Measured("answers", node, True) if node in answers else Measured("answers", node, None, error=said)
        for node in range(expected.nodes)
        if complete or node in answers
    ]
    told = [read_record(file) for file in sorted(folder.glob("rank-*.json"))]
    if complete:
        error = said if len(told) < expected.ranks else ""
        found.append(Measured("ranks", 0, len(told), error=error))
    slowest = max((one.get("connect_seconds", 0.0) for one in told), default=None)
    return [*found, *([Measured("connect", 0, round(slowest, 3))] if slowest is not None else [])]


def _why_ended(run: RunDir) -> str:
    """Return why the run ended without success, such as an image that does not exist."""
    judged, state = run.attempt(0).read_verdict(), run.read_state()
    if judged is not None and not judged.verdict.ok:
        return judged.verdict.reason
    return state.reason if state.failure else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"

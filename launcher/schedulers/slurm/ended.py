"""Judge an attempt whose supervisor died with its job, from Slurm's record and the ranks' output."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from launcher.diagnosis.clue import KIND_OF, Clue, failure_patterns
from launcher.diagnosis.collector import Collector
from launcher.logs.read import TEXT_START
from launcher.rundir.files import replace_json
from launcher.rundir.layout import AttemptDir, RunDir
from launcher.schedulers.slurm.records import JobRecord
from launcher.schedulers.slurm.states import Meaning
from launcher.spec.verdict import Verdict
from launcher.supervise.attempt import tail, torchrun_clues
from launcher.supervise.judge import Evidence, judge_abandoned, read_records, started_ranks

MAX_READ = 2**20
"Bytes read from the end of a rank's log: its worker died before it could record the decisive lines."
THEN = "nothing: the supervisor had ended with its job"


def verdict_of(run: RunDir, record: JobRecord, slurm: Meaning) -> Verdict | None:
    """Judge the latest attempt, and write and return its verdict.

    Return None if the attempt has a verdict already, or if no attempt has begun.
    Raises OSError.
    """
    attempts = run.attempts()
    if not attempts or attempts[-1].verdict.exists():
        return None
    attempt, about = attempts[-1], run.read_about()
    started = started_ranks(attempt)
    evidence = Evidence(
        ranks=max(len(started), 1),
        errors=read_records(attempt, "errors"),
        exits=read_records(attempt, "exits"),
        started=started,
        gpus=about.gpus_per_node != 0,
        torchrun_lines=tuple(tail(attempt.torchrun_log(0))),
        torchrun_clues=torchrun_clues(attempt, about),
        output={rank: list(_clues(run, attempt, node, rank)) for rank, node in started.items()},
        scheduler=_clue(record, slurm),
    )
    verdict = judge_abandoned(
        evidence, f"job {record.id} {slurm.words}", f"Slurm: {record.id} {record.state}"
    )
    replace_json(attempt.verdict, {**verdict.model_dump(), "then": THEN})
    return verdict


def _clue(record: JobRecord, slurm: Meaning) -> Clue | None:
    """Return a clue from Slurm's state, or None for states such as FAILED, which do not name a class.

    Slurm's record is more reliable than a log line. A cancellation keeps its time, because a person may
    cancel a job that has already failed.
    """
    if slurm.failure in (None, "unknown", "succeeded"):
        return None
    time = record.end.timestamp() if record.end is not None and slurm.failure == "cancelled" else 0.0
    return Clue(KIND_OF[slurm.failure], f"job {record.id}: {record.state}", time=time, strength="record")


def _clues(run: RunDir, attempt: AttemptDir, node: int, rank: int) -> Iterator[Clue]:
    """Yield the decisive lines of a rank whose worker left no record."""
    if attempt.exit(rank).exists():
        return
    collector = Collector(failure_patterns(run.read_about()))
    for stream in ("out", "err"):
        lines, first = _last(attempt.rank_log(node, rank, stream))
        for number, line in enumerate(lines, first or 1):
            collector.feed(stream, line[TEXT_START:] + b"\n", number if first else 0)
    yield from collector.clues()


def _last(path: Path) -> tuple[list[bytes], int]:
    """Return the last lines of a log, and the number of the first of them, or 0 if it is unknown."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        start = max(0, path.stat().st_size - MAX_READ)
        file.seek(start)
        lines = file.read(MAX_READ).split(b"\n")
        return (lines[1:], 0) if start else (lines, 1)
    return [], 0

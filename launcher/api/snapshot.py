"""Ask the ranks of a running job for memory snapshots."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.rundir.files import read_json_lines, replace_json
from launcher.rundir.layout import RunDir
from launcher.rundir.time import now
from launcher.schedulers.lookup import scheduler_of
from launcher.spec.errors import RefusedError, UsageError


@dataclass(frozen=True)
class Requested:
    """Snapshots that ranks will write after their next step."""

    run_id: str
    attempt: int
    rank: int | None
    "None: every rank."
    folder: str
    "Folder of the snapshots, for people: `host:path` if it is on another host."

    def __str__(self) -> str:
        who = "every rank" if self.rank is None else f"rank {self.rank}"
        return f"{self.run_id}: asked; {who} records its next step and writes it into {self.folder}"


def request_snapshot(run: RunDir, rank: int | None = None) -> Requested:
    """Ask one rank, or all, to record the memory of its next step.

    Raises UsageError for a run of a `command:`, RefusedError if no ranks run or nothing counts their memory,
    and SchedulerError.
    """
    if run.damage:
        raise RefusedError(run.damage)
    if not run.read_about().job.task:
        raise UsageError(
            f"{run.id} runs a `command:`; only the built-in entrypoint (`task:`) writes snapshots"
        )
    scheduler = scheduler_of(run)
    state, attempts = scheduler.status(run).state, run.attempts()
    if state != "running" or not attempts:
        raise RefusedError(f"{run.id} has no running ranks to ask; its state is {state}")
    attempt = attempts[-1]
    measured = read_json_lines(attempt.memory(rank or 0))
    if measured and "allocated" not in measured[-1]:
        raise RefusedError(
            f"{run.id} trains on the CPU without a memory budget, so nothing counts what tensors hold: set "
            "one in the job's `env:`, e.g. {TRAIN_MEMORY_BUDGET: 16GiB}, and start it again"
        )
    replace_json(attempt.snapshot_request, {"time": now(), "rank": rank})
    scheduler.fetch(run)
    folder = f"{scheduler.where(run)}/{attempt.memory(0).parent.relative_to(run.path)}"
    return Requested(run.id, attempt.number, rank, folder)
